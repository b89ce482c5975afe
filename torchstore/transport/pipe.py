"""The module of `TensorSlice` and `Request` in older releases of Meta's torchstore."""

from skipper.torchstore.transport.types import Request, TensorSlice

__all__ = ["Request", "TensorSlice"]
