"""`InstructionStream`: instructions to some workers on one stream, in order, in batches, kept until acknowledged."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skipper.control import ActorMesh, ControlError, Future
from skipper.tensor_engine.errors import EngineClosedError
from skipper.tensor_engine.script import recording
from skipper.tensor_engine.shared.encoding import FREE, Definition, pack_code, pack_constants, pack_definitions
from skipper.tensor_engine.shared.stacks import Stack, capture

if TYPE_CHECKING:
    from skipper.tensor_engine.script.propagation import CallSite
    from skipper.tensor_engine.script.session import Session

_SMALLEST, _LARGEST = 8, 256
"""Instructions in a batch to two workers: the first ones of a burst leave early, later ones many at a time."""

_MOST = 2048
"""A batch costs about as much as it has receivers, so that it holds the more; but no more than this."""

_UNACKNOWLEDGED = 8
"""Batches of which one is acknowledged: the workers say how far they are."""

_AHEAD = 16384
"""Instructions that may be on their way: then the script waits for the workers to catch up."""

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class StreamKey:
    """A stream, by which instruction streams are told apart.

    Attributes:
        number: unique in the session; 0 is the main one.
        name: for people.
    """

    number: int
    name: str


MAIN = StreamKey(0, "main")


class InstructionStream:
    """Instructions to some workers, on one stream. All of it happens under the lock of the session.

    Attributes:
        number: unique in the script.
        session: that it belongs to.
        stream: that it belongs to.
        ranks: of the workers, in the root mesh.
        actors: the workers.
        freed: numbers of values that nobody in the script needs any more.
        unused: numbers of sites that are not going to be used again.
        count: how many instructions wait to be sent.
        known: numbers of the sites that these workers know.
    """

    def __init__(self, session: Session, stream: StreamKey, ranks: tuple[int, ...], actors: ActorMesh[Any]) -> None:
        self.number = next(_numbers)
        self.session = session
        self.stream = stream
        self.ranks = ranks
        self.members = frozenset(ranks)
        self.actors = actors
        self.freed: deque[int] = deque()
        self.unused: deque[int] = deque()
        self.count = 0
        self.known: set[int] = set()
        self.lost: BaseException | None = None
        self._ones: dict[int, ActorMesh[Any]] = {}
        self._code: list[int] = []
        self._constants: list[Any] = []
        self._is_plain = True
        self._definitions: list[Definition] = []
        self._forgotten: set[int] = set()
        self._stacks: list[Stack] = []
        self._smallest = min(_SMALLEST * max(len(ranks) // 2, 1), _MOST)
        self._largest = min(_LARGEST * max(len(ranks) // 2, 1), _MOST)
        self._limit = self._smallest
        self._next = 0
        self._acknowledged = 0
        self._since_call = 0
        self._weight = 0  # operations that wait to be sent
        self._more = 0  # those that have been sent, beyond one for each instruction
        self._done = 0
        self._on_their_way: deque[tuple[Future[Any], int, int]] = deque()
        self._history: deque[tuple[int, list[Stack]]] = deque()

    def put(
        self,
        site: CallSite,
        outputs: Sequence[int],
        inputs: Sequence[int],
        constants: Sequence[Any] = (),
        depth: int = 2,
        replayed: Stack | None = None,
        weight: int = 1,
    ) -> None:
        """Issue an instruction.

        Args:
            site: what is done.
            outputs: numbers of the values that come out.
            inputs: numbers of those that go in.
            constants: plain numbers for a site of an operation; whatever can be pickled for others.
            depth: how many frames up the line is that is to blame.
            replayed: the stack, where it has been taken already.
            weight: how many operations it stands for: those ahead of the workers are limited.

        Raises:
            EngineClosedError: the engine has been shut down, or a worker is gone.
        """
        session = self.session
        with session.lock:
            if session.newest is not self:
                session.turn_to(self)
            if self.freed:
                self._take_freed()
            if site.number not in self.known:
                self.known.add(site.number)
                self._forgotten.discard(site.number)
                self._definitions.append((site.number, site.form, site.description))
            self._code += (site.number, *outputs, *inputs)
            if constants:
                self._constants += constants
            stack = capture(depth) if replayed is None else replayed
            self._stacks.append(stack)
            if (recorder := recording.current) is not None:
                recorder.note(self, site, outputs, inputs, constants, stack)
            self.count += 1
            self._weight += weight
            if self._weight >= self._limit:
                self._limit = min(4 * self._limit, self._largest)
                self.flush()
            elif self.count == 1 and not session.is_flushing:
                session.wake()

    def put_call(self, site: CallSite, outputs: Sequence[int], inputs: Sequence[int], constant: object) -> None:
        """Issue an instruction with a constant of any kind."""
        with self.session.lock:
            self._is_plain = False
            self.put(site, outputs, inputs, (constant,), depth=4)

    def one(self, position: int) -> Any:
        """The worker at this place of the instruction stream, as a mesh of one."""
        known = self._ones.get(position)
        if known is None:
            known = self._ones[position] = self.actors.slice(**self.actors.extent.point(position))
        return known

    def forget_site(self, number: int) -> None:
        """Have the workers forget a site."""
        if number in self.known:
            self.known.discard(number)
            self._forgotten.add(number)

    def flush(self, *, is_last: bool = False) -> Future[Any] | None:
        """Send what waits.

        Args:
            is_last: nothing is about to follow.

        Returns:
            The future of the workers' acknowledgement, where one was asked for.

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
        if not self._code and not self._forgotten:
            return None
        code, self._code = self._code, []
        constants, self._constants = self._constants, []
        definitions, self._definitions = self._definitions, []
        if self._forgotten:
            definitions += [(number, None, None) for number in self._forgotten]
            self._forgotten.clear()
        stacks, self._stacks = self._stacks, []
        is_plain, self._is_plain = self._is_plain, True
        first = self._next
        self._next += self.count
        self._more += self._weight - self.count
        self.count = self._weight = 0
        if stacks:
            self._history.append((first, stacks))
        self._trim()
        arguments = (
            self.number,
            first,
            pack_definitions(definitions),
            pack_code(code),
            pack_constants(constants) if is_plain else constants,
        )
        try:
            return self._send(arguments, is_last=is_last)
        except ControlError as error:
            self.lost = error  # what follows would refer to what has not been sent
            raise EngineClosedError(f"the engine of this mesh cannot go on: {error}") from error

    def _send(self, arguments: tuple[Any, ...], *, is_last: bool) -> Future[Any] | None:
        self._since_call += 1
        if not is_last and self._since_call < _UNACKNOWLEDGED:
            self.actors.run.broadcast(*arguments)
            return None
        # An answer tells how far they are; a broadcast to workers that have been stopped would be our failure.
        self._since_call = 0
        future: Future[Any] = self.actors.run.call(*arguments)
        upto, operations = self._next, self._next + self._more
        future.add_done_callback(lambda done: self._acknowledge(done, upto, operations))
        self._on_their_way.append((future, upto, operations))
        self._wait_for_those_behind()
        return future

    def stack_of(self, sequence: int) -> Stack | None:
        """Where an instruction was issued, if that is still known."""
        for first, stacks in list(self._history):
            if first <= sequence < first + len(stacks):
                return stacks[sequence - first]
        return None

    @property
    def issued(self) -> int:
        """How many instructions there have been."""
        return self._next + self.count

    @property
    def remembered(self) -> int:
        """How many instructions are remembered, since they are not acknowledged."""
        return sum(len(stacks) for _, stacks in list(self._history))

    def _take_freed(self) -> None:
        freed = self.freed
        if len(freed) == 1:
            self._code += (FREE, 1, freed.popleft())
            return
        refs = [freed.popleft() for _ in range(len(freed))]
        self._code += (FREE, len(refs), *refs)

    def _wait_for_those_behind(self) -> None:
        waiting = self._on_their_way
        while waiting and (waiting[0][0].done() or self._next + self._more - self._done > _AHEAD):
            self._acknowledge(*waiting.popleft())

    def _acknowledge(self, done: Future[Any], upto: int, operations: int) -> None:
        # On a thread of control's, where the lock must not be waited for; or to wait for the workers. That ends with
        # them at the latest.
        try:
            done.get()
        except ControlError as error:
            self.lost = error
            return
        self._acknowledged = max(self._acknowledged, upto)
        self._done = max(self._done, operations)

    def _trim(self) -> None:
        history = self._history
        while history and history[0][0] + len(history[0][1]) <= self._acknowledged:
            history.popleft()
