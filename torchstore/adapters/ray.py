"""Ray's transport of tensors between actors (Ray Direct Transport), by one-sided reads; for Ray 2.60.

Ray carries references and a handle of some 150 bytes for each tensor; the actor that gets one, or the script, reads the
tensor out of the memory of the actor that made it, which takes no part. `torchstore.adapters.register_ray` makes the
transport known: ``ray/experimental/rdt/tensor_transport_manager.py`` is the interface.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from ray.experimental import CommunicatorMetadata, TensorTransportManager, TensorTransportMetadata
from ray.experimental.rdt.tensor_transport_manager import FetchRequest

from skipper import dataplane
from skipper.dataplane import Operation, RDMAAction, RDMABuffer

TRANSPORT = "SKIPPER"
"""The name under which Ray knows this; methods of actors may write it in small letters."""

_BOUND_MS = "RAY_rdt_fetch_fail_timeout_milliseconds"
_DEFAULT_BOUND_MS = 60_000
"""Ray's own bound on a fetch, and the environment's name for it: ``ray/_private/ray_constants.py``."""


@dataclass
class RemoteTensors(TensorTransportMetadata):  # type: ignore[misc]  # Ray is typed in part
    """What Ray carries of an object's tensors in place of their bytes.

    Attributes:
        handles: Of each tensor, as `RDMABuffer.deserialize` takes it; None of one without elements.
    """

    handles: list[bytes | None] = field(default_factory=list)


@dataclass
class PendingRead(FetchRequest):  # type: ignore[misc]
    """A fetch under way: the tensors have their values once the operation has succeeded."""

    operation: Operation


class TensorTransport(TensorTransportManager):  # type: ignore[misc]
    """One for each process of Ray, which makes it; its methods are called from several threads.

    A tensor is registered where it lies, so what its actor writes into it later is what others read from then on, as
    with every transport of Ray's; one that is not contiguous is copied once, when the object is made. It stays
    registered until Ray has no reference to the object any more.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffers: dict[str, list[RDMABuffer | None]] = {}

    def tensor_transport_backend(self) -> str:
        """The name by which methods of actors ask for it."""
        return TRANSPORT

    @staticmethod
    def is_one_sided() -> bool:
        """The reader does all the work."""
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        """A read that fails leaves nobody waiting, so Ray need not kill the two actors."""
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        """Ray asks before it submits a task; whether there is a way between two actors shows when they use it."""
        return True

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: Sequence[torch.Tensor]) -> RemoteTensors:
        """Register the tensors of an object that was made in this process, on whatever devices they are.

        Args:
            obj_id: Ray's name of the object. One that is known, as when a task is repeated, is not registered anew.
            rdt_object: The tensors: on CPUs or CUDA, all of one kind.

        Raises:
            BackendUnavailableError: There is no way by which others could read that memory.
            ConfigurationError: There is no secret to prove handles by.
            TypeError: A tensor has no plain memory: it is sparse, say, or a DTensor.
            ValueError: They are on devices of several kinds.
        """
        kinds = sorted({tensor.device.type for tensor in rdt_object})
        if len(kinds) > 1:
            raise ValueError(f"the tensors of one object are on {' and '.join(kinds)}; Ray takes one kind of device")
        with self._lock:
            buffers = self._buffers.get(obj_id)
        if buffers is None:
            buffers = [_register(tensor) for tensor in rdt_object]
        handles = [None if buffer is None else buffer.serialize() for buffer in buffers]
        with self._lock:
            self._buffers[obj_id] = buffers
        described = [(tensor.shape, tensor.dtype) for tensor in rdt_object]
        return RemoteTensors(described, kinds[0] if kinds else None, handles)

    def get_communicator_metadata(
        self, src_actor: Any, dst_actor: Any, backend: str | None = None
    ) -> CommunicatorMetadata:
        """Handles say where the memory is: the two actors need to know nothing of each other."""
        return CommunicatorMetadata()

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: RemoteTensors,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: Sequence[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """Read the tensors of an object, and wait for them; see `fetch_multiple_tensors`."""
        pending = self.fetch_multiple_tensors(obj_id, tensor_transport_metadata, communicator_metadata, target_buffers)
        return self.wait_fetch_complete(pending)

    def fetch_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: RemoteTensors,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: Sequence[torch.Tensor] | None = None,
    ) -> PendingRead:
        """Begin to read the tensors of an object, all in one batch.

        Args:
            obj_id: Ray's name of the object.
            tensor_transport_metadata: What its maker has said of it.
            communicator_metadata: Not needed.
            target_buffers: Where to read them to, of the same shapes and dtypes, on any device; None: into new tensors,
                on a device of the maker's kind.

        Returns:
            The read, for `wait_fetch_complete`. It ends by itself, in an error at the latest after Ray's own bound on a
            fetch (60 s, or what ``RAY_rdt_fetch_fail_timeout_milliseconds`` says).

        Raises:
            ConfigurationError: There is no secret to know handles by.
            DescriptorError: A handle was made under a secret that this process does not know.
            ValueError: A target buffer does not fit.
        """
        tensors = list(target_buffers) if target_buffers is not None else _empty_for(tensor_transport_metadata)
        action = RDMAAction()
        for tensor, handle in zip(tensors, tensor_transport_metadata.handles, strict=True):
            if handle is not None:
                action.read_remote(tensor.detach(), RDMABuffer.deserialize(handle))
        bound_s = int(os.environ.get(_BOUND_MS, _DEFAULT_BOUND_MS)) / 1000
        return PendingRead(obj_id, tensors, action.submit(bound_s))

    def wait_fetch_complete(self, fetch_request: PendingRead, timeout: float = -1) -> list[torch.Tensor]:
        """The tensors of a read, when they are there.

        Args:
            fetch_request: What `fetch_multiple_tensors` has returned.
            timeout: Seconds; 0 looks and does not wait, a negative one waits as long as the read may take.

        Raises:
            DataplaneError: It has failed: the maker is dead (`OwnerDiedError`), say, or cannot be reached.
            TransferTimeoutError: It goes on after the timeout, or has taken longer than it may.
        """
        operation = fetch_request.operation
        if timeout == 0 and not operation.done():
            raise dataplane.TransferTimeoutError(
                f"the tensors of Ray's object {fetch_request.obj_id} are not available yet"
            )
        operation.get(timeout if timeout > 0 else None)
        tensors: list[torch.Tensor] = fetch_request.tensors
        return tensors

    def send_multiple_tensors(
        self,
        tensors: Sequence[torch.Tensor],
        tensor_transport_metadata: RemoteTensors,
        communicator_metadata: CommunicatorMetadata,
    ) -> None:
        """Ray calls it of two-sided transports alone.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("tensors are read one-sidedly; nothing is sent")

    def garbage_collect(
        self, obj_id: str, tensor_transport_meta: RemoteTensors, tensors: Sequence[torch.Tensor]
    ) -> None:
        """End the registration of an object that was made here: handles to it are stale from then on, everywhere."""
        with self._lock:
            buffers = self._buffers.pop(obj_id, [])
        for buffer in buffers:
            if buffer is not None:
                buffer.drop()

    def abort_transport(self, obj_id: str, communicator_metadata: CommunicatorMetadata) -> None:
        """There is nothing to do: a read that has failed is over, and one that goes on ends by its own bound."""


def _register(tensor: torch.Tensor) -> RDMABuffer | None:
    """A tensor as others may read it; None without elements."""
    if not tensor.numel():
        return None
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.layout is torch.strided and not plain.is_contiguous():
        copy = dataplane.empty(plain.shape, plain.dtype, device=str(plain.device))
        plain = copy.copy_(plain)
    return RDMABuffer(plain, writable=False)


def _empty_for(described: RemoteTensors) -> list[torch.Tensor]:
    return [torch.empty(shape, dtype=dtype, device=described.tensor_device) for shape, dtype in described.tensor_meta]
