"""`InstructionStream`: instructions to some workers on one stream, in order, in batches, kept until acknowledged."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skipper.control import ActorMesh, ControlError, Future
from skipper.tensor_engine.errors import EngineClosedError
from skipper.tensor_engine.script.call_site import CallSite
from skipper.tensor_engine.shared.encoding import FREE, Definition, pack, pack_code
from skipper.tensor_engine.shared.stacks import Stack, capture

if TYPE_CHECKING:
    from skipper.tensor_engine.script.session import EngineSession

_SMALLEST, _LARGEST = 8, 256
"""Instructions in a batch to two workers: the first ones of a burst leave early, later ones in large batches."""

_MOST = 2048
"""The cost of a batch grows with the number of its receivers, so more receivers get larger batches, up to this."""

_UNACKNOWLEDGED = 8
"""The workers acknowledge one of this many batches, which tells their progress."""

_AHEAD = 16384
"""How many instructions may be in flight. With more of them the script waits for the workers to catch up."""

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class StreamKey:
    """The engine's key of a user's stream.

    Attributes:
        number: unique in the script; 0 is the main one.
        name: for people.
    """

    number: int
    name: str


MAIN = StreamKey(0, "main")

StreamPlace = tuple[tuple[int, ...], StreamKey]
"""The target of an instruction stream: the ranks of workers, and a stream."""


class IssueOrder:
    """The single order of all instructions of a session, across its instruction streams.

    Two instruction streams may go to the same worker. Before the second one takes an instruction, the waiting ones of
    the first for that worker must be sent. So all instruction streams of a session share this lock.

    Attributes:
        lock: held while instructions are issued or sent.
        newest: the instruction stream that got the last instruction. Read and written under the lock.
        streams: all of them, by the ranks and the stream that they are for. Added to under the lock.
        is_flushing: whether the flusher is awake, and need not be woken. Written under the lock.
        is_closed: whether the engine has been shut down. Written under the lock.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.newest: InstructionStream | None = None
        self.streams: dict[StreamPlace, InstructionStream] = {}
        self.is_flushing = False
        self.is_closed = False
        self.woken = threading.Event()

    def check(self) -> None:
        """Check that it is still open.

        Raises:
            EngineClosedError: it is closed.
        """
        if self.is_closed:
            raise EngineClosedError("the tensor engine of this mesh was shut down; activate a mesh again")

    def turn_to(self, stream: InstructionStream) -> None:
        """First send what waits for the same workers in other instruction streams. Called under the lock."""
        self.check()
        for other in list(self.streams.values()):
            if other is not stream and other.count and other.stream == stream.stream and other.members & stream.members:
                other.flush()
        self.newest = stream

    def wake(self) -> None:
        """Wake the flusher, which sends what waits. Called under the lock."""
        self.is_flushing = True
        self.woken.set()


class _Batch:
    """The instructions that wait to be sent. Read and written under the lock of the `IssueOrder`.

    Attributes:
        code: instructions, as `shared.encoding` writes them.
        constants: the constants of these.
        is_plain: whether all constants are numbers.
        definitions: of the sites that these workers do not know yet.
        stacks: where each instruction was issued.
        weight: how many operations the instructions stand for.
    """

    __slots__ = ("code", "constants", "definitions", "is_plain", "stacks", "weight")

    def __init__(self) -> None:
        self.code: list[int] = []
        self.constants: list[Any] = []
        self.is_plain = True
        self.definitions: list[Definition] = []
        self.stacks: list[Stack] = []
        self.weight = 0


class _Progress:
    """The workers' progress with what was sent, and where it was issued.

    The sending thread holds the lock of the `IssueOrder`. Acknowledgements come on a thread of `control`, which must
    not wait for that lock: they only increase two numbers. A thread that reads an old number only keeps more than it
    needs.

    Attributes:
        sent: the number of the next instruction to send.
    """

    __slots__ = ("_acknowledged", "_beyond", "_done", "_history", "_on_their_way", "_since_answer", "sent")

    def __init__(self) -> None:
        self.sent = 0
        self._beyond = 0  # operations that have been sent, beyond one for each instruction
        self._acknowledged = 0  # instructions that have been run
        self._done = 0  # operations that have been run
        self._since_answer = 0
        self._on_their_way: deque[tuple[Future[Any], int, int]] = deque()
        self._history: deque[tuple[int, list[Stack]]] = deque()

    @property
    def operations(self) -> int:
        """How many operations have been sent."""
        return self.sent + self._beyond

    @property
    def remembered(self) -> int:
        """How many instructions are remembered, since they are not acknowledged."""
        return sum(len(stacks) for _, stacks in list(self._history))

    def add(self, stacks: list[Stack], weight: int) -> int:
        """Note a batch that is sent; returns the number of its first instruction."""
        first = self.sent
        self.sent += len(stacks)
        self._beyond += weight - len(stacks)
        history = self._history
        if stacks:
            history.append((first, stacks))
        while history and history[0][0] + len(history[0][1]) <= self._acknowledged:
            history.popleft()
        return first

    def is_answer_due(self, *, is_last: bool) -> bool:
        """Whether the workers must acknowledge the batch that is sent now."""
        self._since_answer += 1
        if not is_last and self._since_answer < _UNACKNOWLEDGED:
            return False
        self._since_answer = 0
        return True

    def expect(self, answer: Future[Any]) -> tuple[int, int]:
        """Note the answer to everything sent so far; returns what it acknowledges, for `acknowledge`."""
        upto, operations = self.sent, self.operations
        self._on_their_way.append((answer, upto, operations))
        return upto, operations

    def next_answer(self) -> tuple[Future[Any], int, int] | None:
        """Remove and return an answer that has come, or that must be awaited since too much is in flight."""
        waiting = self._on_their_way
        if waiting and (waiting[0][0].done() or self.operations - self._done > _AHEAD):
            return waiting.popleft()
        return None

    def expect_no_more(self) -> None:
        """Expect no missing answers any more: some workers that should answer are gone."""
        self._on_their_way.clear()

    def acknowledge(self, upto: int, operations: int) -> None:
        """Note the workers' progress. For any thread."""
        self._acknowledged = max(self._acknowledged, upto)
        self._done = max(self._done, operations)

    def stack_of(self, sequence: int) -> Stack | None:
        """Where an instruction was issued, if that is still known. For any thread."""
        for first, stacks in list(self._history):
            if first <= sequence < first + len(stacks):
                return stacks[sequence - first]
        return None


class InstructionStream:
    """Instructions to some workers, on one stream.

    Everything happens under the lock of the session's `IssueOrder`, with these exceptions: finalizers fill ``freed``
    and ``unused`` in any thread, without a lock; any thread may call `stack_of` and `remembered`, and set ``lost``,
    once.

    Attributes:
        number: unique in the script.
        session: that it belongs to.
        stream: that it belongs to.
        ranks: of the workers, in the root mesh.
        members: the same as a set.
        actors: the workers.
        freed: numbers of values that the script no longer needs.
        unused: numbers of sites that will not be used again.
        known: numbers of the sites that all of these workers know.
        lost: why nothing can be sent any more, or None.
    """

    def __init__(
        self,
        session: EngineSession,
        order: IssueOrder,
        stream: StreamKey,
        ranks: tuple[int, ...],
        actors: ActorMesh[Any],
    ) -> None:
        self.number = next(_numbers)
        self.session = session
        self.stream = stream
        self.ranks = ranks
        self.members = frozenset(ranks)
        self.actors = actors
        self.freed: deque[int] = deque()
        self.unused: deque[int] = deque()
        self.known: set[int] = set()
        self.lost: BaseException | None = None
        self._order = order
        self._batch = _Batch()
        self._progress = _Progress()
        self._forgotten: set[int] = set()
        self._known_to_some: set[int] = set()  # sites that only workers from before a rejoin know
        self._lives = 0
        self._has_gap = False
        self._ones: dict[int, ActorMesh[Any]] = {}
        pairs = max(len(ranks) // 2, 1)
        self._smallest, self._largest = min(_SMALLEST * pairs, _MOST), min(_LARGEST * pairs, _MOST)
        self._limit = self._smallest

    def put(
        self,
        site: CallSite,
        outputs: Sequence[int],
        inputs: Sequence[int],
        constants: Sequence[Any] = (),
        depth: int = 2,
        replayed: Stack | None = None,
        weight: int = 1,
        is_plain: bool = True,
    ) -> Stack:
        """Issue an instruction.

        Args:
            site: the operation.
            outputs: numbers of the output values.
            inputs: numbers of the input values.
            constants: numbers; if they are not plain, anything that can be pickled.
            depth: how many frames up the issuing line is.
            replayed: the stack, if it has been taken already.
            weight: how many operations it stands for; the number ahead of the workers is limited.
            is_plain: whether all constants are numbers.

        Returns:
            The stack: where the script issued it.

        Raises:
            EngineClosedError: the engine has been shut down, or a worker is gone.
        """
        order = self._order
        with order.lock:
            if order.newest is not self:
                order.turn_to(self)
            if self.freed:
                self._take_freed()
            if site.number not in self.known:
                self.known.add(site.number)
                self._forgotten.discard(site.number)
                self._batch.definitions.append((site.number, site.form, site.description))
            code = (site.number, *outputs, *inputs)
            stack = capture(depth) if replayed is None else replayed
            # Only now: an allocation above may have run a user's finalizer, which may also issue.
            batch = self._batch
            batch.code += code
            if constants:
                batch.constants += constants
                batch.is_plain &= is_plain
            batch.stacks.append(stack)
            batch.weight += weight
            if batch.weight >= self._limit:
                self._limit = min(4 * self._limit, self._largest)
                self.flush()
            elif not order.is_flushing and len(batch.stacks) == 1:
                order.wake()
        return stack

    def one(self, position: int) -> Any:
        """The worker at this position of the instruction stream, as a mesh of one."""
        known = self._ones.get(position)
        if known is None:
            known = self._ones[position] = self.actors.slice(**self.actors.extent.point(position))
        return known

    def forget_site(self, number: int) -> None:
        """Make the workers forget a site."""
        if number in self.known or number in self._known_to_some:
            self.known.discard(number)
            self._known_to_some.discard(number)
            self._forgotten.add(number)

    def rejoin(self, actors: ActorMesh[Any], *, has_new: bool) -> None:
        """Continue with other workers in place of those that are gone. `send_to_the_rest` has sent what waited.

        Args:
            actors: the workers from now on.
            has_new: whether some of them are new, and know nothing.
        """
        self.actors = actors
        self._ones.clear()
        self._lives += 1
        self.lost = None
        self._progress.expect_no_more()
        if has_new:
            self._known_to_some |= self.known
            self.known.clear()

    def send_to_the_rest(self) -> None:
        """Send what waits to the workers that are left. The values of the other workers are lost.

        Raises:
            EngineClosedError: a worker that is left had no room for a batch, and now lacks its instructions.
        """
        if self._has_gap:
            raise EngineClosedError(
                f"the engine of this mesh cannot go on: some instructions have not been sent: {self.lost}"
            ) from self.lost
        lost, self.lost = self.lost, None
        try:
            self.flush()
        finally:
            self.lost = self.lost or lost

    def flush(self, *, is_last: bool = False) -> Future[Any] | None:
        """Send what waits.

        Args:
            is_last: nothing will follow soon.

        Returns:
            The future of the workers' acknowledgement, if one was requested.

        Raises:
            EngineClosedError: a worker is gone.
        """
        if self.lost is not None:
            raise EngineClosedError(f"the engine of this mesh cannot go on: {self.lost}") from self.lost
        if self.freed:
            self._take_freed()
        while self.unused:
            self.forget_site(self.unused.popleft())
        if is_last:
            self._limit = self._smallest
        if not self._batch.code and not self._forgotten:
            return None
        batch, self._batch = self._batch, _Batch()
        definitions = batch.definitions
        if self._forgotten:
            definitions += [(number, None, None) for number in self._forgotten]
            self._forgotten.clear()
        first = self._progress.add(batch.stacks, batch.weight)
        arguments = (
            self.number,
            first,
            pack(definitions),
            pack_code(batch.code),
            pack(batch.constants) if batch.is_plain else batch.constants,
        )
        try:
            return self._send(arguments, is_last=is_last)
        except ControlError as error:
            self.lost = error  # later instructions would refer to unsent ones
            self._has_gap = True
            raise EngineClosedError(f"the engine of this mesh cannot go on: {error}") from error

    def stack_of(self, sequence: int) -> Stack | None:
        """Where an instruction was issued, if that is still known."""
        return self._progress.stack_of(sequence)

    @property
    def count(self) -> int:
        """How many instructions wait to be sent."""
        return len(self._batch.stacks)

    @property
    def is_waiting(self) -> bool:
        """Whether anything waits to be sent: instructions, or what the workers can free or forget."""
        return bool(self._batch.stacks or self.freed or self.unused)

    @property
    def issued(self) -> int:
        """How many instructions there have been."""
        return self._progress.sent + self.count

    @property
    def remembered(self) -> int:
        """How many instructions are remembered, since they are not acknowledged."""
        return self._progress.remembered

    def _take_freed(self) -> None:
        freed = self.freed
        code: tuple[int, ...]
        if len(freed) == 1:
            code = (FREE, 1, freed.popleft())
        else:
            refs = [freed.popleft() for _ in range(len(freed))]
            code = (FREE, len(refs), *refs)
        self._batch.code += code

    def _send(self, arguments: tuple[Any, ...], *, is_last: bool) -> Future[Any] | None:
        progress = self._progress
        if not progress.is_answer_due(is_last=is_last):
            self.actors.run.broadcast(*arguments)
            return None
        # The answer tells the workers' progress. A broadcast to stopped workers would fail the script.
        answer: Future[Any] = self.actors.run.call(*arguments)
        upto, operations = progress.expect(answer)
        life = self._lives
        answer.add_done_callback(lambda done: self._acknowledge(done, upto, operations, life))
        while (due := progress.next_answer()) is not None:
            self._acknowledge(*due, life)
        return answer

    def _acknowledge(self, answer: Future[Any], upto: int, operations: int, life: int) -> None:
        # On a thread of `control`, which must not wait for the lock; or in a wait for the workers, which ends at the
        # latest when they end.
        try:
            answer.get()
        except ControlError as error:
            if life == self._lives:  # otherwise it is from before a rejoin
                self.lost = error
            return
        self._progress.acknowledge(upto, operations)
