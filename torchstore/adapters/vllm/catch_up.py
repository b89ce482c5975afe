"""An engine that starts after a send loads by itself what was sent."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

import torch

from skipper import control
from skipper.torchstore.adapters.board import LastSend, tell
from skipper.torchstore.adapters.vllm.load_form import LoadForm
from skipper.torchstore.adapters.vllm.messages import TorchStoreInitInfo, TorchStoreUpdateInfo
from skipper.torchstore.adapters.vllm.ranks import all_say
from skipper.torchstore.adapters.vllm.reading import RecordedLoads, UpdateReader, UpdateRecord

JOB_VARIABLE = "SKIPPER_VLLM_JOB"

_JOIN_S = 60.0
_TRIES = 20
_AGAIN_S = 0.25

_log = logging.getLogger(__name__)


def catch_up(
    job: str, form: LoadForm, known: RecordedLoads, device: torch.device, group: Any
) -> tuple[TorchStoreInitInfo | None, UpdateRecord | None]:
    """Load the last send of a job's trainer; all ranks of an engine call this, and load the same version.

    Args:
        job: The address of the job, for `control.join`.
        form: The load form of the model.
        known: The plans recorded so far; new ones are added.
        device: The device of the model.
        group: The ranks of the engine; see `workers_of`.

    Returns:
        The connection to the trainer, or None if it has sent nothing; and the costs of the load, or None if nothing
        could be loaded. Then the log has a warning, and the model keeps its weights.
    """
    connection: TorchStoreInitInfo | None = None
    record: UpdateRecord | None = None
    number, said = "", [""]
    for _ in range(_TRIES):
        last, own = _look(job)
        reader: UpdateReader | None = None
        if last is not None:
            connection = replace(TorchStoreInitInfo(**last.connection), address=job)
            if not last.why_gone and own != number:
                reader, own = _read(last, form, known, device)
        said = all_say(own, group)
        is_same = len(set(said)) == 1
        if is_same and reader is not None:
            reader.load()
            number, record = own, reader.record()
            continue  # there may be a newer send by now
        if is_same and (own == number or last is None or last.why_gone):
            break
        time.sleep(_AGAIN_S)
    if record is None:
        _log.warning("this engine serves the weights that it started with until the next send: %s", "; ".join(said))
    return connection, record


def _look(job: str) -> tuple[LastSend | None, str]:
    """The last send, and its number as a text, or the reason why none can be read."""
    try:
        control.join(job, timeout=_JOIN_S, replace=True)
        last: LastSend | None = tell("last_send")
    except Exception as error:  # noqa: BLE001  (an engine starts without its trainer)
        return None, f"the job {job} cannot be joined: {type(error).__name__}: {error}"
    if last is None:
        return None, "its trainer has sent nothing yet"
    return last, last.why_gone or str(last.number)


def _read(
    last: LastSend, form: LoadForm, known: RecordedLoads, device: torch.device
) -> tuple[UpdateReader | None, str]:
    """Read all pieces of a send. Returns its number, or the error, for example if a newer send replaced it."""
    connection = TorchStoreInitInfo(**last.connection)
    reader = UpdateReader(form, known, connection, device, part_nbytes=None, version_of=lambda version: version)
    try:
        for piece in last.pieces:
            reader.receive(TorchStoreUpdateInfo(**piece))
    except Exception as error:  # noqa: BLE001  (the next try may find a newer one)
        return None, f"send {last.number} cannot be read: {type(error).__name__}: {error}"
    return reader, str(last.number)
