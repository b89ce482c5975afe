"""Decoders with a mistake in each, to see that the fuzzer finds it: `python -m tests.fuzz.planted FOLDER`."""

import ast
import ctypes
import struct
import sys
from pathlib import Path
from types import ModuleType

from skipper.control.model.errors import ProtocolError
from skipper.control.wire import frames
from tests.fuzz import runner, wire
from tests.fuzz.mutation import split_parts
from tests.fuzz.target import Target

_RECORD = struct.pack("<HI", 4, 8) + b"contents"
_SECONDS = 120.0


class _Careless(ast.NodeTransformer):
    """Takes away the handlers that make one error of all that unpacking raises."""

    taken = 0

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.ExceptHandler:
        if node.type is not None and "struct.error" in ast.unparse(node.type):
            node.type = ast.copy_location(ast.Name("NotImplementedError", ast.Load()), node.type)
            self.taken += 1
        return node


def careless_frames() -> ModuleType:
    """`control.wire.frames` without the handler that makes one error of all that a frame can be wrong in."""
    careless = _Careless()
    tree = careless.visit(ast.parse(Path(frames.__file__).read_text(encoding="utf-8")))
    if not careless.taken:
        raise LookupError(f"{frames.__file__} handles no struct.error any more: plant another mistake")
    copy = ModuleType("careless_frames")
    sys.modules[copy.__name__] = copy
    exec(compile(ast.fix_missing_locations(tree), frames.__file__, "exec"), copy.__dict__)
    return copy


_careless = careless_frames()


def feed_careless(data: bytes) -> None:
    """A stream to the copy."""
    decoder = _careless.Decoder()
    for message in split_parts(data):
        decoder.feed(message)


def _length(data: bytes) -> int:
    if len(data) < 6:
        raise ProtocolError("too short")
    return int(struct.unpack_from("<I", data, 2)[0])


def believe_length(data: bytes) -> None:
    """Makes room for what is announced."""
    bytearray(_length(data))


def read_at_length(data: bytes) -> None:
    """Reads where it is told to, if that is far enough away."""
    if (address := _length(data)) > 1 << 20:
        ctypes.string_at(address, 8)


def walk_records(data: bytes) -> None:
    """Goes from one record to the next by its size, which may be 0."""
    at = 0
    while at + 2 <= len(data):
        at += struct.unpack_from("<H", data, at)[0]


TARGETS = (
    Target("careless", feed_careless, wire.frame_seeds, (ProtocolError,)),
    Target("believes", believe_length, lambda: [_RECORD], (ProtocolError,)),
    Target("reads", read_at_length, lambda: [_RECORD], (ProtocolError,)),
    Target("walks", walk_records, lambda: [_RECORD], (ProtocolError,)),
)


def main(folder: Path) -> None:
    """Fuzz each until it is found, and say what was."""

    def seeds(target: Target) -> list[Path]:
        begin = folder / f"{target.name}-seeds"
        begin.mkdir(parents=True)
        for number, seed in enumerate(target.seeds()):
            (begin / str(number)).write_bytes(seed)
        return sorted(begin.iterdir())

    results = runner.run(TARGETS, _SECONDS, out=folder, jobs=2, seed=1, guided=False, until_found=True, corpus=seeds)
    for result in results:
        for finding in result.findings:
            print(f"{finding.target}: {finding.what.partition(':')[0]}: {len(finding.file.read_bytes())} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
