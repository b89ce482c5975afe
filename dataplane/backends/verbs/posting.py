"""What is posted where, and what has completed: runs, lanes and their credits.

All of it is for holders of the lock of `verbs_engine`, which adds the threads.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

from skipper.dataplane.backends.verbs.chain import Chunk
from skipper.dataplane.backends.verbs.link import FLUSHED, Lane, Link, Run, Sole
from skipper.dataplane.backends.verbs.rails import Rail
from skipper.dataplane.errors import TransferError

_POLL = 64


class Posting(ABC):
    """Chunks go out in the order in which their runs came, as far as there is room; completions come back."""

    def __init__(self) -> None:
        self._runs: set[Run] = set()  # under way
        self._starting: Run | None = None  # whose thread sees by itself that it is over
        self._finished: deque[Callable[[], None]] = deque()  # what is to be called without the lock

    def post_sole(self, lane: Lane, chunk: Chunk) -> Sole | None:
        """Post what is all of a run, if nothing else is under way there, before the run is made.

        The caller holds the lock, keeps it until it has given a run for one that is not over to `adopt`, and calls
        `report` when it has let go of it.

        Returns:
            What stands for the run; None if nothing was posted.
        """
        rail = lane.rail
        if not lane.link.alive or lane.in_flight or lane.waiting or chunk.count > min(lane.room, rail.room):
            return None
        chunk.last.wr_id = lane.serial
        try:
            lane.pair.post(chunk.first)
        except TransferError:
            return None  # whoever tries again is told
        sole = Sole()
        lane.room -= chunk.count
        rail.room -= chunk.count
        lane.in_flight.append((sole, chunk.count))
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

    def _enter(self, run: Run, link: Link) -> None:
        """Post the chunks of its phase, as far as there is room."""
        run.link = link
        for rail in run.rails():
            if link.alive:
                lane = link.lanes[rail]
                lane.waiting.append(run)
                self._pump(lane)

    def _pump(self, lane: Lane) -> None:
        """Post chunks in the order in which their runs came, while there are credits."""
        link, rail = lane.link, lane.rail
        while link.alive and lane.waiting:
            run = lane.waiting[0]
            chunk = run.next_chunk(rail.index)
            if chunk is None:
                lane.waiting.popleft()
                continue
            if chunk.count > lane.room:
                return
            if chunk.count > rail.room:
                rail.starved.append(lane)
                return
            chunk.last.wr_id = lane.serial
            try:
                lane.pair.post(chunk.first)
            except TransferError:
                self._break(link, run, FLUSHED)
                return
            lane.room -= chunk.count
            rail.room -= chunk.count
            lane.in_flight.append((run, chunk.count))
            run.outstanding += 1
            run.posted(rail.index)

    def _reap(self, rail: Rail) -> None:
        """Hand out all completions of a rail that are there."""
        while True:
            found = rail.completions.poll(_POLL)
            for completion in found:
                lane = rail.lanes.get(completion.qp_num)
                # A number is given again to a later queue pair, and requests that do not complete bear no serial.
                if lane is None or completion.wr_id not in (lane.serial, 0):
                    continue
                if completion.status == 0:
                    self._complete(lane)
                else:
                    culprit = lane.in_flight[0][0] if lane.in_flight else None
                    self._break(lane.link, culprit, completion.status, lane)
            if len(found) < _POLL:
                return

    def _complete(self, lane: Lane) -> None:
        run, count = lane.in_flight.popleft()
        lane.room += count
        lane.rail.room += count
        run.outstanding -= 1
        if run.outstanding == 0 and run.all_posted():
            if run.phase_over():
                self._enter(run, lane.link)
            else:
                run.over = True
                self._runs.discard(run)
                if run is not self._starting:
                    self._finished.append(run.finish)
        if lane.waiting:
            self._pump(lane)
        if lane.rail.starved:
            self._feed(lane.rail)

    def _feed(self, rail: Rail) -> None:
        """Post what waited for other lanes' credits."""
        starved, rail.starved = rail.starved, []
        for lane in starved:
            self._pump(lane)

    @abstractmethod
    def _break(self, link: Link, culprit: Run | None, status: int, lane: Lane | None = None) -> None:
        """The link has failed: destroy its queue pairs, so that nothing moves any more, then tell its runs."""
