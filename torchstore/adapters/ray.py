"""Ray's transport of tensors between actors (Ray Direct Transport), by one-sided reads; for Ray 2.60.

Ray carries references, and a handle of about 150 bytes for each tensor. The actor (or the script) that gets a reference
reads the tensor from the memory of the actor that made it; that actor does nothing for it.
`torchstore.adapters.register_ray` registers the transport. Its interface is
``ray/experimental/rdt/tensor_transport_manager.py``.
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
"""The name of this transport in Ray; methods of actors may also write it in lower case."""

_BOUND_MS = "RAY_rdt_fetch_fail_timeout_milliseconds"
_DEFAULT_BOUND_MS = 60_000
"""Ray's own timeout of a fetch, and its environment variable: ``ray/_private/ray_constants.py``."""


@dataclass
class RemoteTensors(TensorTransportMetadata):  # type: ignore[misc]  # Ray is typed in part
    """The description of an object's tensors that Ray carries in place of their bytes.

    Attributes:
        handles: The handle of each tensor, for `RDMABuffer.deserialize`; None for a tensor without elements.
    """

    handles: list[bytes | None] = field(default_factory=list)


@dataclass
class PendingRead(FetchRequest):  # type: ignore[misc]
    """A fetch in progress: the tensors have their values when the operation has succeeded."""

    operation: Operation


class TensorTransport(TensorTransportManager):  # type: ignore[misc]
    """The transport in one process of Ray, which creates it and calls its methods from several threads.

    A tensor is registered in its own memory. If its actor changes it later, others read the new values, as with every
    transport of Ray. A tensor that is not contiguous is copied once, when the object is made. It stays registered until
    Ray has no more references to the object.
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
        """Nobody waits after a failed read, so Ray need not kill the two actors."""
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        """Ray asks before it submits a task; whether two actors can reach each other is known only when they try."""
        return True

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: Sequence[torch.Tensor]) -> RemoteTensors:
        """Register the tensors of an object that was made in this process.

        Args:
            obj_id: Ray's id of the object. A known object, of a repeated task for example, is not registered again.
            rdt_object: The tensors: all on CPUs, or all on CUDA devices.

        Raises:
            BackendUnavailableError: No backend lets other processes read that memory.
            ConfigurationError: There is no secret that proves handles.
            TypeError: A tensor has no plain memory: it is sparse, for example, or a DTensor.
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
        """Handles say where the memory is, so the two actors need no information about each other."""
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
        """Start to read the tensors of an object, all in one batch.

        Args:
            obj_id: Ray's name of the object.
            tensor_transport_metadata: The metadata from the actor that made the object.
            communicator_metadata: Not needed.
            target_buffers: The destinations, of the same shapes and dtypes, on any device; None: new tensors, on a
                device of the same kind as in the actor that made the object.

        Returns:
            The read, for `wait_fetch_complete`. It ends by itself: with an error at the latest after Ray's own timeout
            of a fetch (60 s, or the value of ``RAY_rdt_fetch_fail_timeout_milliseconds``).

        Raises:
            ConfigurationError: There is no secret to verify handles with.
            DescriptorError: A handle was made with a secret that this process does not have.
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
        """Wait for a read, and return its tensors.

        Args:
            fetch_request: The read that `fetch_multiple_tensors` has returned.
            timeout: In seconds. 0: do not wait; negative: wait as long as the read may take.

        Raises:
            DataplaneError: The read has failed: the owner of the memory is dead (`OwnerDiedError`) or unreachable, say.
            TransferTimeoutError: The read is not finished after the timeout, or has taken longer than it may.
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
        """Ray calls this only for two-sided transports.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("tensors are read one-sidedly; nothing is sent")

    def garbage_collect(
        self, obj_id: str, tensor_transport_meta: RemoteTensors, tensors: Sequence[torch.Tensor]
    ) -> None:
        """End the registration of an object that was made here: from then on, all handles to it are stale."""
        with self._lock:
            buffers = self._buffers.pop(obj_id, [])
        for buffer in buffers:
            if buffer is not None:
                buffer.drop()

    def abort_transport(self, obj_id: str, communicator_metadata: CommunicatorMetadata) -> None:
        """Do nothing: a failed read has ended, and a running one ends by its own timeout."""


def _register(tensor: torch.Tensor) -> RDMABuffer | None:
    """A tensor, registered for other processes; None if it has no elements."""
    if not tensor.numel():
        return None
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.layout is torch.strided and not plain.is_contiguous():
        copy = dataplane.empty(plain.shape, plain.dtype, device=str(plain.device))
        plain = copy.copy_(plain)
    return RDMABuffer(plain, writable=False)


def _empty_for(described: RemoteTensors) -> list[torch.Tensor]:
    return [torch.empty(shape, dtype=dtype, device=described.tensor_device) for shape, dtype in described.tensor_meta]
