"""Regenerate the protobuf code: ``python -m skipper.control.wire.regenerate``; with ``--check`` only compare."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

WIRE = Path(__file__).parent
SOURCES = WIRE / "proto"
GENERATED = WIRE / "_generated"
PACKAGE_DOC = (
    '"""Generated from the files of `proto/` by `python -m skipper.control.wire.regenerate`; do not edit."""\n'
)


def generate(folder: Path) -> None:
    """Write the Python code and stubs of every proto file into ``folder``.

    Raises:
        subprocess.CalledProcessError: protoc rejected a file.
    """
    command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={SOURCES}"]
    command += [f"--python_out={folder}", f"--pyi_out={folder}"]
    command += sorted(str(source) for source in SOURCES.glob("*.proto"))
    subprocess.run(command, check=True, timeout=120)
    (folder / "__init__.py").write_text(PACKAGE_DOC)


def difference() -> list[str]:
    """Names of the generated files that are missing, stale or superfluous."""
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh = {path.name: path.read_bytes() for path in Path(scratch).glob("*.py*")}
    present = {path.name: path.read_bytes() for path in GENERATED.glob("*.py*")}
    return sorted(name for name in fresh.keys() | present.keys() if fresh.get(name) != present.get(name))


def main() -> int:
    """Return 0, or 1 if ``--check`` found a difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail where the committed code is stale")
    if not parser.parse_args().check:
        GENERATED.mkdir(exist_ok=True)
        generate(GENERATED)
        return 0
    stale = difference()
    if stale:
        sys.stderr.write(f"stale generated code in {GENERATED.name}/: {', '.join(stale)}; run make proto\n")
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
