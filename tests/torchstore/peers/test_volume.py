"""The memory of dead publishers, whatever of their requests is still on its way."""

import pytest

from skipper.control import ActorError, this_host
from skipper.torchstore.peers.volume import DeadWriterError, StorageVolume
from skipper.torchstore.support.process import ProcessId

DEAD, OTHER = ProcessId("elsewhere", 1, 1), ProcessId("elsewhere", 2, 1)
NBYTES = 64


async def test_a_request_that_comes_later_than_its_sender_was_taken_for_dead_keeps_no_memory() -> None:
    procs = this_host().spawn_procs({"gpus": 1})
    volume = procs.spawn("volume", StorageVolume, lambda: "0", None)
    before = await volume.allocate.call_one(DEAD, NBYTES, 3)
    kept = await volume.allocate.call_one(DEAD, NBYTES, 4)
    await volume.free_writer.call_one(DEAD, (kept.id,), 5)
    with pytest.raises(ActorError) as refused:
        await volume.allocate.call_one(DEAD, NBYTES, 4)
    assert isinstance(refused.value.cause, DeadWriterError)
    assert before.id != kept.id
    assert await volume.usage.call_one() == (1, NBYTES)

    await volume.free_writer.call_one(DEAD, (kept.id,), 2)  # an earlier message of an earlier controller
    with pytest.raises(ActorError):
        await volume.allocate.call_one(DEAD, NBYTES, 4)
    await volume.allocate.call_one(DEAD, NBYTES, 5)  # the process has joined the job again
    await volume.allocate.call_one(OTHER, NBYTES, 1)
    assert await volume.usage.call_one() == (3, 3 * NBYTES)
    await procs.stop()
