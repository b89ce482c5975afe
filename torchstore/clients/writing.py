"""Writing an arena: run the copy, and say what it means when that fails."""

from __future__ import annotations

from skipper.dataplane import RDMAAction
from skipper.dataplane.errors import BufferDroppedError, OwnerDiedError, TransferTimeoutError
from skipper.torchstore.clients.arenas import Arena, ArenaPool
from skipper.torchstore.clients.remote import Remote
from skipper.torchstore.errors import StoreTimeoutError
from skipper.torchstore.support.records import Cost
from skipper.torchstore.tensors.plan import execute


async def write_arena(
    remote: Remote,
    pool: ArenaPool,
    arena: Arena,
    write: RDMAAction,
    nbytes: int,
    cost: Cost,
    timeout: float,
    *,
    fresh: bool,
) -> None:
    """Copy into an arena; after an error it is used no more.

    Args:
        remote: The store.
        pool: Whose the arena is.
        arena: Taken from it.
        write: The copy.
        nbytes: How much it moves.
        cost: Of the put.
        timeout: In seconds.
        fresh: The copy runs for the first time.

    Raises:
        BufferDroppedError: The volume has freed the arena; it still is the pool's.
        VolumeLostError: The volume is dead.
        StoreTimeoutError: The copy was not done in time.
    """
    # Nothing is kept until the write is done, and then only for tensors that come again.
    arena.mark, arena.write = (), None
    try:
        with cost.spent_on("transfer"):
            await execute(write, nbytes, timeout, fresh=fresh)
    except BufferDroppedError:
        raise
    except OwnerDiedError as error:
        pool.discard(arena.binding.id)
        await remote.volume_lost(arena.binding.volume, error, timeout)
    except TransferTimeoutError as error:
        pool.abandon(arena)
        raise StoreTimeoutError(f"writing {arena.key!r}: {error}") from error
    except BaseException:
        pool.abandon(arena)
        raise
    arena.used = True
    cost.nbytes += nbytes
    cost.segments += write.segments
