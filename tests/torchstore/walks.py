"""Random walks through the commands of a store's controller, and what its state looks like after them.

``python -m tests.torchstore.walks <address of a journal>`` prints the digest of what a process of its own reads there.
"""

import ast
import hashlib
import random
import sys
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from types import FunctionType, MethodType
from typing import Any

import torch

from skipper.torchstore.algebra.manifest import Binding, Manifest
from skipper.torchstore.algebra.sections import Section
from skipper.torchstore.controller.journal import Journal, JournalAddress
from skipper.torchstore.controller.reading import _are_leased
from skipper.torchstore.controller.recorder import Recorder
from skipper.torchstore.controller.state import Command
from skipper.torchstore.errors import StoreError
from skipper.torchstore.protocol.batches import BatchGrant, BatchPublication, Columns
from skipper.torchstore.protocol.messages import Publication, Selector, Share, Wanted
from skipper.torchstore.protocol.origin import ALONE, Origin, Turn
from skipper.torchstore.support.process import ProcessId
from skipper.torchstore.tensors.packing import pack

KEYS = ("m", "m/a", "m/b", "x", "y.z")
SECTION = 16384


class Walker:
    """Does what clients do, at random.

    Args:
        seed: Equal ones do the same.
        recorder: Of the store.
    """

    def __init__(self, seed: int, recorder: Recorder) -> None:
        self.recorder = recorder
        self.done: dict[str, int] = {}
        self._chance = random.Random(seed)
        self.clients: dict[int, ProcessId] = {}
        self._pids = count(1)
        self._ids = count(1)
        self._requests = count(1)
        self._puts: dict[tuple[int, str], int] = {}
        self._asked: list[Command] = []
        self._leases: list[tuple[str, int]] = []
        self._batches: list[int] = []
        self._bindings: list[Binding] = []
        self._manifests = [_manifest({"": torch.zeros(3)}, "value"), _manifest({"a": torch.zeros(2)}, "state_dict")]
        self._manifests.append(_manifest({"a": torch.zeros(2), "b": torch.zeros(5)}, "state_dict"))

    def steps(self, number: int) -> None:
        """Do so many things."""
        ways: list[Callable[[], None]] = [
            *[self.put] * 6,
            *[self.put_in_group] * 3,
            *[self.put_batch] * 2,
            *[self.put_inline] * 2,
            *[self.get] * 6,
            *[self.get_values] * 2,
            *[self.release] * 5,
            *[self.finish] * 2,
            *(self.join, self.withdraw, self.close, self.reserve, self.rollback, self.delete),
            *(self.reclaim, self.make_room, self.die, self.ask_again),
        ]
        for _ in range(number):
            way = self._chance.choice(ways) if self.clients else self.join
            try:
                way()
            except StoreError as error:
                self._count(type(error).__name__)
            else:
                self._count(way.__name__)

    def _count(self, name: str) -> None:
        self.done[name] = self.done.get(name, 0) + 1

    def _client(self) -> int:
        return self._chance.choice(list(self.clients))

    def _key(self) -> str:
        return self._chance.choice(KEYS)

    def _do(self, name: str, *arguments: Any) -> Any:
        return self.recorder.do(Command(name, arguments))

    def _once(self, client: int, name: str, *arguments: Any) -> Any:
        request = next(self._requests)
        command = Command(name, arguments, client, request, max(request - 3, 1))
        self._asked = [*self._asked[-2:], command]
        return self.recorder.do(command)

    def join(self) -> None:
        process = ProcessId("elsewhere", next(self._pids), 1)
        self.clients[self._do("welcome", process, None)] = process

    def die(self) -> None:
        client = self._client()
        volumes = ("0",) if self._chance.random() < 0.1 else ()
        self._do("process_died", self.clients.pop(client), volumes)

    def binding(self, mode: Any) -> Binding | str:
        known = [binding for binding in self._bindings if binding.mode == mode]
        if known and self._chance.random() < 0.6:
            found = self._chance.choice(known)
            return found.id if self._chance.random() < 0.5 else found
        name = f"arena-{next(self._ids)}"
        self._bindings.append(Binding(name, mode, "0" if mode == "snapshot" else "", ()))
        return self._bindings[-1]

    def publication(self, client: int, key: str, turn: Turn) -> Publication:
        return Publication(
            key,
            self._chance.choice((None, None, None, self._chance.randrange(1, 9))),
            self.clients[client],
            self._chance.choice(self._manifests),
            self.binding(self._chance.choice(("snapshot", "snapshot", "direct"))),
            generation=self._chance.randrange(4),
            keep=self._chance.choice((None, 1, 3)),
            turn=turn,
        )

    def put(self) -> None:
        client = self._client()
        turns = [ALONE] * self._chance.choice((1, 1, 2))
        sent = tuple(self.publication(client, self._key(), turn) for turn in turns)
        self._once(client, "publish", self._chance.random(), client, sent)

    def put_in_group(self) -> None:
        client, key = self._client(), self._key()
        number = self._puts[client, key] = self._puts.get((client, key), 0) + 1
        alone = self._chance.choice((True, False))
        turn = Turn(Origin("group", client % 2, 2), f"session {client}", number, alone)
        self._once(client, "publish", 0.0, client, (self.publication(client, key, turn),))

    def put_batch(self) -> None:
        client = self._client()
        keys = tuple(self._chance.sample(KEYS, self._chance.randrange(2, 4)))
        offsets = tuple(SECTION * self._chance.randrange(number + 1) for number in range(len(keys)))
        columns = Columns(keys, (0,) * len(keys), offsets, (SECTION,) * len(keys))
        binding = Binding(f"arena-{next(self._ids)}", "snapshot", "0", ())
        inline = {self._key(): b"small"} if self._chance.random() < 0.3 else {}
        batch = BatchPublication(self.clients[client], binding, (self._manifests[0],), columns.encode(), inline)
        self._once(client, "publish", 0.0, client, (batch,))

    def put_inline(self) -> None:
        client = self._client()
        self._once(client, "put_inline", client, self._key(), b"value")

    def ask_again(self) -> None:
        """A request whose answer was lost, and perhaps not the last one."""
        if self._asked:
            self.recorder.do(self._chance.choice(self._asked))

    def get(self) -> None:
        chance = self._chance
        selector = chance.choice((Selector(), Selector(), Selector(exact=chance.randrange(1, 9)), Selector(None, 0)))
        read_group = chance.choice(("", "circle"))
        wanted = tuple(Wanted(self._key(), selector, (), read_group) for _ in range(chance.choice((1, 1, 2))))
        grants = self.recorder.attempt(Command("grant", (self._client(), wanted)), _are_leased)
        self._leases += [(one.key, one.lease) for grant in grants or () for one in (grant, *grant.singles) if one.lease]

    def get_values(self) -> None:
        keys = tuple(self._chance.sample(KEYS, 2))
        granted: BatchGrant | None = self.recorder.attempt(
            Command("grant_values", (self._client(), keys)),
            lambda found: found is not None and (found.lease or found.others),
        )
        if granted is not None:
            self._batches += [granted.lease] if granted.lease else []
            self._leases += [(grant.key, grant.lease) for grant in granted.others.values() if grant.lease]

    def release(self) -> None:
        given = tuple(self._leases.pop() for _ in range(min(self._chance.randrange(3), len(self._leases))))
        batch = self._batches.pop(0) if self._batches and self._chance.random() < 0.5 else 0
        self._do("release", given, batch)

    def finish(self) -> None:
        if self._leases:
            client = self._client()
            key, lease = self._leases.pop(0)
            binding = Binding(f"copy-{next(self._ids)}", "direct", "", ())
            share = Share(self._manifests[0], binding, 1, self.clients[client])
            offered = self._chance.choice((None, share))
            self._do("finish", client, key, lease, offered, self._chance.random() < 0.2)

    def withdraw(self) -> None:
        self._do("withdraw", self._client(), self._key())

    def close(self) -> None:
        self._do("close", self._client(), self._key())

    def reserve(self) -> None:
        client = self._client()
        self._once(client, "reserve", client, self._key())

    def rollback(self) -> None:
        self._once(self._client(), "rollback", self._key(), self._chance.randrange(1, 9))

    def delete(self) -> None:
        self._once(self._client(), "delete", (self._key(),), self._chance.random() < 0.5)

    def reclaim(self) -> None:
        client = self._client()
        self._once(client, "reclaim", client)

    def make_room(self) -> None:
        self.recorder.attempt(Command("make_room", (self._client(), "0", self._chance.randrange(5))), bool)


def _manifest(tensors: dict[str, torch.Tensor], kind: Any) -> Manifest:
    return pack("k", kind, "snapshot", tensors).manifest


def checkpoint(thing: Any) -> Any:
    """All of an object and what it refers to, as plain values: equal for equal states, in any process."""
    return _picture(thing, {})


def _picture(thing: Any, seen: dict[int, int]) -> Any:
    if thing is None or isinstance(thing, str | bytes | int | float | bool | torch.dtype):
        return thing if not isinstance(thing, torch.dtype) else str(thing)
    if isinstance(thing, MethodType | FunctionType | type):
        return thing.__qualname__
    if isinstance(thing, Binding | Manifest) and type(thing) is not Section:
        return [type(thing).__name__, thing.id]
    if not _is_value(thing):
        if id(thing) in seen:
            return ("again", seen[id(thing)])
        seen[id(thing)] = len(seen)
    if isinstance(thing, dict):
        return [(_picture(key, seen), _picture(value, seen)) for key, value in thing.items()]
    if isinstance(thing, set | frozenset):
        return ["set", *sorted(map(repr, thing))]
    if isinstance(thing, list | tuple):
        return [_picture(item, seen) for item in thing]
    if isinstance(thing, partial):
        return [_picture(thing.func, seen), _picture(thing.args, seen)]
    if isinstance(thing, BaseException):
        return [type(thing).__name__, str(thing)]
    return [type(thing).__name__, *((name, _picture(value, seen)) for name, value in _fields(thing))]


def _is_value(thing: Any) -> bool:
    """Whether it never changes, so that it does not matter how many there are of it."""
    parameters = getattr(type(thing), "__dataclass_params__", None)
    return isinstance(thing, tuple | Section) or (parameters is not None and parameters.frozen)


def _fields(thing: Any) -> Iterable[tuple[str, Any]]:
    names = [name for cls in type(thing).__mro__ for name in getattr(cls, "__slots__", ())]
    names += sorted(getattr(thing, "__dict__", {}))
    # How handles are packed on their way is no part of what they are.
    return [
        (name, getattr(thing, name)) for name in names if name not in ("_packed", "_memory", "__weakref__", "_effects")
    ]


def digest(recorder: Recorder) -> str:
    """Of the state."""
    return hashlib.sha256(repr(checkpoint(recorder.state)).encode()).hexdigest()


def reopened(address: JournalAddress) -> Recorder:
    """A controller that takes the place of another one."""
    recorder = Recorder("s")
    recorder.open(Journal(address, 5.0))
    return recorder


def left(recorder: Recorder) -> Recorder:
    """The same when its process has died: nothing is tidied up."""
    journal_of(recorder).close()
    return recorder


def journal_of(recorder: Recorder) -> Journal:
    """Where it writes what it does."""
    assert recorder._journal is not None
    return recorder._journal


if __name__ == "__main__":
    host, pid, start, first, second, token = ast.literal_eval(sys.argv[1])
    print(digest(reopened(JournalAddress(ProcessId(host, pid, start), (first, second), token))))
