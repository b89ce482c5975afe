"""``python -m tests.dataplane.mutated --count N``: handles that were changed on their way, tried by the thousand.

Real handles of owners on every way that works without special hardware are mutated field by field, cut, spliced and
flipped. Most keep the proof that they had, get none, or one of somebody else: those must be refused before anything is
used. The others are proved again with the right key, as a buggy or compromised peer would: there the owner's own
registration, and the reader's look at numbers and lengths, are what holds. Owners and readers are processes of their
own, and what is counted are those that die, accesses beside what was registered, errors without a type, and calls that
are not back by their deadline. All of these must be 0.

What a proved handle says of memory that a reader reaches on its own, in a mapping or by the kernel, nobody but the
reader can hold against anything: there the mutated ones are read with, never written with.
"""

import argparse
import dataclasses
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from skipper.dataplane import DataplaneError, DescriptorError, RDMABuffer
from skipper.dataplane import handle as handles
from skipper.dataplane.backends.ucx.card import HEAD, pack_parts, unpack_parts
from skipper.dataplane.handle import SHM, UCX, Card
from skipper.dataplane.keys import Keys
from skipper.dataplane.regions import MemoryKind
from tests.conformance.owner import Memory, RemoteOwner, main
from tests.handles import parsed, proved

TIMEOUT_S = 1.0
LATE_S = 10.0
"""Beyond the timeout: the machine may be busy with other things."""

LIFE = 2000
"""Attempts of one reader: each owner that a mutated card seems to name costs connections."""

NBYTES = 3000
VIOLATIONS = ("crashed", "late", "untyped", "accepted", "beside")
WAYS: dict[str, tuple[dict[str, Any] | None, bool, bool]] = {
    # settings of the owner (None: the reader itself), shared memory, whether the owner takes part in each access
    "local": (None, False, True),
    "shm": ({}, True, False),
    "cma": ({}, False, False),
    "posix": ({"backend": "ucx", "ucx": {"TLS": "posix,self", "POSIX_ERROR_HANDLING": "y"}}, False, True),
    "tcp": ({"backend": "ucx", "ucx": {"TLS": "tcp,self"}}, False, True),
}
EDGES = (0, 1, 7, 8, 4095, 4096, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 4096, (1 << 64) - 1)


class Mutator:
    """Mutations of one handle, drawn from a seed."""

    def __init__(self, raw: bytes, seed: int, *, at_home: bool) -> None:
        self.raw = raw
        self.chosen = random.Random(seed)
        self.handle, self.offset, self.nbytes = parsed(raw)
        self.stranger = Keys(b"a secret of somebody else")
        self.at_home = at_home  # its owner is the process that tries it

    def next(self) -> tuple[bytes, bool]:
        """A mutated handle, and whether its proof is good."""
        kind = self.chosen.randrange(6)
        if kind == 0:
            return self._flipped(), False
        if kind == 1:
            return self.raw[: self.chosen.randrange(len(self.raw))], False
        card, body = self._mutated()
        if kind == 2:
            return handles.join(card, self.stranger.seal(card, body)), False
        if kind == 3:
            _, sealed = handles.split(self.raw)
            return handles.join(card, body + sealed[-(len(sealed) - len(self._body())) :]), False
        return proved(card, body), True

    def _flipped(self) -> bytes:
        raw = bytearray(self.raw)
        for _ in range(self.chosen.choice((1, 1, 2, 8))):
            raw[self.chosen.randrange(len(raw))] ^= 1 << self.chosen.randrange(8)
        return bytes(raw)

    def _body(self) -> bytes:
        return self.handle.body(self.offset, self.nbytes)

    def _number(self, near: int, bits: int) -> int:
        way = self.chosen.randrange(3)
        if way == 0:
            value = self.chosen.choice(EDGES)
        elif way == 1:
            value = near + self.chosen.choice((-4096, -64, -8, -1, 1, 8, 64, 4096, NBYTES))
        else:
            value = self.chosen.getrandbits(self.chosen.choice((8, 16, 32, 48, 63, 64)))
        return value % (1 << bits)

    def _mutated(self) -> tuple[bytes, bytes]:
        """Halves with one to three fields changed."""
        handle, offset, nbytes = self.handle, self.offset, self.nbytes
        for _ in range(self.chosen.choice((1, 1, 1, 2, 3))):
            field = self.chosen.choice(
                ("slot", "epoch", "base", "total", "device", "writable", "kind", "offset", "nbytes", "card", "section")
            )
            if field == "offset":
                offset = self._number(offset, 64)
            elif field == "nbytes":
                nbytes = self._number(nbytes, 64)
            elif field == "writable":
                handle = dataclasses.replace(handle, writable=not handle.writable)
            elif field == "kind":
                # Over UCX that is the library's own affair, and it protects nothing from who is let in.
                kind = MemoryKind.CUDA if UCX not in handle.sections else handle.kind
                handle = dataclasses.replace(handle, kind=kind)
            elif field == "card":
                handle = dataclasses.replace(handle, card=self._card(handle.card))
            elif field == "section":
                handle = dataclasses.replace(handle, sections=self._sections(handle.sections, self._of_body))
            else:
                bits = {"slot": 32, "device": 16}.get(field, 64)
                handle = dataclasses.replace(handle, **{field: self._number(getattr(handle, field), bits)})
        return handle.card.encoded, handle.body(offset, nbytes)

    def _card(self, card: Card) -> Card:
        owner, page_token = card.owner, card.page_token
        field = self.chosen.choice(("host", "pid", "started", "token", "page_token", "sections", "sections"))
        if field == "sections":
            return Card.make(owner, page_token, self._sections(card.sections, self._of_card))
        if field == "page_token":
            return Card.make(owner, self._number(page_token, 64), card.sections)
        value = self._number(getattr(owner, field), 32 if field == "pid" else 64)
        return Card.make(dataclasses.replace(owner, **{field: value}), page_token, card.sections)

    def _sections(self, sections: dict[int, bytes], change: Callable[[int, bytes], bytes]) -> dict[int, bytes]:
        if not sections:
            return {self.chosen.randrange(256): self.chosen.randbytes(self.chosen.randrange(64))}
        number = self.chosen.choice(list(sections))
        way = self.chosen.randrange(6)
        content = sections[number]
        if way == 0:
            return {other: value for other, value in sections.items() if other != number}
        if way == 1:
            content = content[: self.chosen.randrange(len(content) + 1)]
        elif way == 2:
            content += self.chosen.randbytes(self.chosen.randrange(1, 40))
        elif way == 3:
            changed = bytearray(content or b"\0")
            changed[self.chosen.randrange(len(changed))] ^= 1 << self.chosen.randrange(8)
            content = bytes(changed)
        elif way == 4:
            return {**sections, self.chosen.choice((SHM, UCX, 3, 77)): self.chosen.randbytes(30)}
        else:
            content = change(number, content)
        return {**sections, number: content}

    def _of_card(self, number: int, content: bytes) -> bytes:
        """Other numbers where it has numbers; of what UCX has packed, nothing, or too little with a right checksum."""
        if number != UCX or len(content) < HEAD.size:
            return self._number(int.from_bytes(content[:4], "little"), 32).to_bytes(4, "little") + content[4:]
        address, fd = HEAD.unpack_from(content)
        if self.chosen.random() < 0.5:
            address = self._number(address, 64)
        else:
            fd = self._number(fd, 32)
        return HEAD.pack(address, fd) + content[HEAD.size :]

    def _of_body(self, number: int, content: bytes) -> bytes:
        if number == UCX:
            (key,) = unpack_parts(content, 1) if content == self.handle.sections.get(UCX) else (b"",)
            return pack_parts(key[: self.chosen.randrange(len(key) + 1)])
        at = self.chosen.choice((0, 4, 12))
        size = 4 if at == 0 else 8
        value = self._number(int.from_bytes(content[at : at + size], "little"), 8 * size)
        return content[:at] + value.to_bytes(size, "little") + content[at + size :]


class Reader(Memory):
    """Tries mutated handles, and says what came of them."""

    def attack(
        self, way: str, raws: list[bytes], around: list[bytes], seed: int, count: int
    ) -> tuple[dict[str, int], list[str], bytes]:
        """Try `count` mutations of these handles: writable, read-only; those around them are all read-only.

        Returns:
            How often each thing happened, the first violations in words, what the writable buffer must hold now.
        """
        owner_decides = WAYS[way][2]
        counts: Counter[str] = Counter()
        found: list[str] = []
        contents = [bytearray(b"\x11" * NBYTES), bytearray(b"\x22" * NBYTES)]
        self._readable = [handle.base + offset for handle, offset, _ in map(parsed, [*raws, *around])]
        mutators = [Mutator(raw, seed + at, at_home=way == "local") for at, raw in enumerate(raws)]
        chosen = random.Random(~seed)
        for number in range(count):
            which = chosen.randrange(len(raws))
            raw, is_proved = mutators[which].next()
            begin = time.monotonic()
            outcome, said = self._attempt(mutators[which], contents[which], raw, is_proved, owner_decides, chosen)
            if time.monotonic() - begin > TIMEOUT_S + LATE_S:
                outcome, said = "late", f"{time.monotonic() - begin:.1f} s, {outcome}"
            counts[outcome] += 1
            if outcome in VIOLATIONS and len(found) < 5:
                found.append(f"{way}, seed {seed}, number {number}: {outcome}: {said}: {raw.hex()}")
        return dict(counts), found, bytes(contents[0])

    def _attempt(
        self,
        mutator: Mutator,
        content: bytearray,
        raw: bytes,
        is_proved: bool,
        owner_decides: bool,
        chosen: random.Random,
    ) -> tuple[str, str]:
        try:
            buffer = RDMABuffer.deserialize(raw)
        except DescriptorError:
            return "refused", ""
        except Exception as error:  # noqa: BLE001 - what has no type of ours is what is looked for
            return "untyped", repr(error)
        if not is_proved and raw != mutator.raw:
            return "accepted", "without a good proof"
        nbytes = min(buffer.nbytes, NBYTES)
        handle, offset, _ = parsed(raw)
        # What claims to be of somebody else is reached as if from outside, also where that is this very process.
        if mutator.at_home and handle.card.owner != mutator.handle.card.owner:
            owner_decides = False
        at = handle.base + offset - mutator.handle.base  # where it lies in the true buffer
        inside = at >= 0 and at + nbytes <= NBYTES and handle.epoch == mutator.handle.epoch
        try:
            use = chosen.randrange(3) if owner_decides else 0
            if use == 0:
                into = np.zeros(nbytes, np.uint8)
                buffer.at(0, nbytes).read_into(into, timeout=TIMEOUT_S).get()
                right = inside and into.tobytes() == bytes(content[at : at + nbytes])
                right = right or self._is_within_another(handle.base + offset, nbytes)
                return ("read", "") if right or not owner_decides else ("beside", f"read at {at}")
            if not mutator.handle.writable and handle.writable:
                inside = False
            if use == 1:
                buffer.at(0, nbytes).write_from(b"\xee" * nbytes, timeout=TIMEOUT_S).get()
                if inside:
                    content[at : at + nbytes] = b"\xee" * nbytes
                return ("written", "") if inside else ("beside", f"written at {at}")
            buffer.fetch_add(0, timeout=TIMEOUT_S).get()
        except (DataplaneError, ValueError):
            return "failed", ""
        except Exception as error:  # noqa: BLE001 - likewise
            return "untyped", repr(error)
        right = at >= 0 and at + 8 <= NBYTES and handle.epoch == mutator.handle.epoch and mutator.handle.writable
        return ("added", "") if right else ("beside", f"added at {at}")

    def _is_within_another(self, address: int, nbytes: int) -> bool:
        """Whether it is memory that the owner has registered too: who knows the job's key may have a handle to it."""
        return any(base <= address and address + nbytes <= base + NBYTES for base in self._readable)


def run(count: int, seed: int, ways: list[str]) -> tuple[Counter[str], list[str]]:
    """Try so many mutations over these ways; what happened, and the first violations in words."""
    counts: Counter[str] = Counter()
    found: list[str] = []
    for way, (share, first) in zip(ways, _shares(count, len(ways), seed), strict=True):
        _run_way(way, share, first, counts, found)
    return counts, found


def _shares(count: int, ways: int, seed: int) -> Iterator[tuple[int, int]]:
    for at in range(ways):
        yield count // ways + (at < count % ways), seed + (at << 40)


def _run_way(way: str, count: int, seed: int, counts: Counter[str], found: list[str]) -> None:
    settings, shared, _ = WAYS[way]
    owner: RemoteOwner | None = None
    while count > 0:
        share = min(count, LIFE)
        count, seed = count - share, seed + 100
        reader = RemoteOwner({"ucx": {"NET_DEVICES": "lo"}}, shared=False, module="tests.dataplane.mutated")
        if owner is None and settings is not None:
            owner = RemoteOwner(settings, shared=shared)
        subject = owner or reader
        try:
            _try(way, subject, reader, seed, share, counts, found)
        except (EOFError, OSError) as error:
            counts["crashed"] += 1
            found.append(f"{way}, seed {seed}: {type(error).__name__}: {error}")
            if owner is not None:
                owner.close()
            owner = None
        finally:
            reader.close()
    if owner is not None:
        owner.close()


def _try(
    way: str,
    owner: RemoteOwner,
    reader: RemoteOwner,
    seed: int,
    count: int,
    counts: Counter[str],
    found: list[str],
) -> None:
    """One reader's life. What lies around the buffers is looked at, too."""
    neighbours = [owner("make", b"\x33" * NBYTES, False)]
    writable, raw = owner("make_filled", NBYTES, 0x11)
    neighbours.append(owner("make", b"\x33" * NBYTES, False))
    readable, raw_of_readable = owner("make", b"\x22" * NBYTES, False)
    neighbours.append(owner("make", b"\x33" * NBYTES, False))
    reader.tell("attack", way, [raw, raw_of_readable], [raw for _, raw in neighbours], seed, count)
    end = time.monotonic() + 60 + count * (TIMEOUT_S + LATE_S)
    while not reader._connection.poll(1.0):
        if time.monotonic() > end:
            raise EOFError("the reader does not come back")
    happened, violations, expected = reader.reply()
    counts.update(happened)
    found += violations
    is_same = [owner("content", writable) == expected, owner("content", readable) == b"\x22" * NBYTES]
    is_same += [owner("content", name) == b"\x33" * NBYTES for name, _ in neighbours]
    if not all(is_same):
        counts["beside"] += 1
        found.append(f"{way}, seed {seed}: the owner's memory is not as it should be: {is_same}")
    for name in (*(name for name, _ in neighbours), writable, readable):
        owner("drop", name)


def command(arguments: list[str]) -> int:
    """Run, print a table, and tell by the exit status whether all is well."""
    parser = argparse.ArgumentParser(prog="python -m tests.dataplane.mutated", description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="mutations altogether")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--way", action="append", choices=WAYS, help="only that one; may be repeated")
    given = parser.parse_args(arguments)
    counts, found = run(given.count, given.seed, given.way or list(WAYS))
    for name in (*sorted(counts.keys() - VIOLATIONS), *VIOLATIONS):
        print(f"{name:10} {counts[name]:10}")
    print(*found, sep="\n")
    return 1 if any(counts[name] for name in VIOLATIONS) else 0


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].isdecimal():
        main(Reader)
    else:
        sys.exit(command(sys.argv[1:]))
