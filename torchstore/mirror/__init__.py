"""Versions of a state dict in a folder or an object store, for jobs that share nothing else."""

from skipper.torchstore.mirror.publisher import Mirror
from skipper.torchstore.mirror.reader import MirrorReader
from skipper.torchstore.mirror.signatures import SharedSecret, SigningKey, VerifyingKey

__all__ = ["Mirror", "MirrorReader", "SharedSecret", "SigningKey", "VerifyingKey"]
