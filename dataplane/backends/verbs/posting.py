"""What is posted where, and what has completed: runs, send queues and their credits.

All of it is for holders of the lock of `VerbsEngine`, which adds the threads.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

from skipper.dataplane.backends.verbs.chain import RequestChain
from skipper.dataplane.backends.verbs.connection import FLUSHED, PostedRun, Rail, SendQueue, SoleRun, VerbsConnection
from skipper.dataplane.errors import TransferError

_POLL = 64


class Posting(ABC):
    """Posts chains in the order in which their runs came, as far as there is room, and takes their completions."""

    def __init__(self) -> None:
        self._runs: set[PostedRun] = set()  # under way
        self._starting: PostedRun | None = None  # whose thread sees by itself that it is over
        self._finished: deque[Callable[[], None]] = deque()  # what is to be called without the lock

    def post_sole(self, queue: SendQueue, chain: RequestChain) -> SoleRun | None:
        """Post the only chain of a run before the run is made, if nothing else is under way there.

        The caller holds the lock. If the transfer is not over, the caller gives `adopt` a run before it lets go of the
        lock. Then it calls `report`.

        Returns:
            What stands for the run; None if nothing was posted.
        """
        rail = queue.rail
        if not queue.connection.alive or queue.in_flight or queue.waiting or chain.count > min(queue.room, rail.room):
            return None
        chain.last.wr_id = queue.serial
        try:
            queue.pair.post(chain.first)
        except TransferError:
            return None  # the next attempt raises it
        sole = SoleRun()
        queue.room -= chain.count
        rail.room -= chain.count
        queue.in_flight.append((sole, chain.count))
        self._starting = sole
        self._reap(rail)
        self._starting = None
        return sole

    def report(self) -> None:
        """Tell what has finished, without the lock: what is called may submit again."""
        while self._finished:
            try:
                tell = self._finished.popleft()
            except IndexError:  # another thread was quicker
                return
            tell()

    def _enter(self, run: PostedRun, connection: VerbsConnection) -> None:
        """Post the chains of a run's phase, as far as there is room."""
        run.connection = connection
        for rail in run.rails():
            if connection.alive:
                queue = connection.queues[rail]
                queue.waiting.append(run)
                self._pump(queue)

    def _pump(self, queue: SendQueue) -> None:
        """Post chains in the order in which their runs came, while there are credits."""
        connection, rail = queue.connection, queue.rail
        while connection.alive and queue.waiting:
            run = queue.waiting[0]
            chain = run.next_chain(rail.index)
            if chain is None:
                queue.waiting.popleft()
                continue
            if chain.count > queue.room:
                return
            if chain.count > rail.room:
                rail.starved.append(queue)
                return
            chain.last.wr_id = queue.serial
            try:
                queue.pair.post(chain.first)
            except TransferError:
                self._break(connection, run, FLUSHED)
                return
            queue.room -= chain.count
            rail.room -= chain.count
            queue.in_flight.append((run, chain.count))
            run.outstanding += 1
            run.posted(rail.index)

    def _reap(self, rail: Rail) -> None:
        """Hand out all completions of a rail that are there."""
        while True:
            found = rail.completions.poll(_POLL)
            for completion in found:
                queue = rail.queues.get(completion.qp_num)
                # A number is given again to a later queue pair, and requests that do not complete bear no serial.
                if queue is None or completion.wr_id not in (queue.serial, 0):
                    continue
                if completion.status == 0:
                    self._complete(queue)
                else:
                    culprit = queue.in_flight[0][0] if queue.in_flight else None
                    self._break(queue.connection, culprit, completion.status, queue)
            if len(found) < _POLL:
                return

    def _complete(self, queue: SendQueue) -> None:
        run, count = queue.in_flight.popleft()
        queue.room += count
        queue.rail.room += count
        run.outstanding -= 1
        if run.outstanding == 0 and run.all_posted():
            if run.phase_over():
                self._enter(run, queue.connection)
            else:
                run.over = True
                self._runs.discard(run)
                if run is not self._starting:
                    self._finished.append(run.finish)
        if queue.waiting:
            self._pump(queue)
        if queue.rail.starved:
            self._feed(queue.rail)

    def _feed(self, rail: Rail) -> None:
        """Post what waited for the credits of other send queues."""
        starved, rail.starved = rail.starved, []
        for queue in starved:
            self._pump(queue)

    @abstractmethod
    def _break(
        self, connection: VerbsConnection, culprit: PostedRun | None, status: int, queue: SendQueue | None = None
    ) -> None:
        """A connection has failed: destroy its queue pairs, so that nothing moves any more, then tell its runs."""
