"""`python -m tests.gpu wheels | test | bench`, on nothing but a Python; see `tests.gpu`."""

import argparse
import sys
import time
from pathlib import Path

from tests.gpu import benching, environment, testing, wheels
from tests.gpu.errors import GpuRunError
from tests.gpu.parts import Runner
from tests.tree import ROOT


def main() -> int:
    """See above; the exit status is 0 where all is well."""
    begin = time.monotonic()
    given = _parse()
    folder = given.wheels.resolve()
    try:
        if given.command == "wheels":
            found = wheels.download(
                folder, python=given.python, cuda=given.cuda, has=given.has.split(), limit_mib=given.limit_mib
            )
            mib = sum(wheel.stat().st_size for wheel in found) / 2**20
            print(f"{len(found)} wheels for CPython {given.python}, {mib:.1f} MiB, in {folder}")
            return 0
        out: Path = given.out.resolve()
        out.mkdir(parents=True, exist_ok=True)
        python, installed = environment.make(ROOT / "build" / "gpu" / "venv", folder, cuda=given.cuda)
    except GpuRunError as error:
        print(f"make {given.target}: {error}", file=sys.stderr)
        return 2
    print(f"from the wheels: {' '.join(installed) or 'nothing, all was there'}", flush=True)
    left_s = given.total_s - (time.monotonic() - begin)
    runner = Runner(python, out / f"{given.command}.log", left_s)
    if given.command == "bench":
        return benching.run(runner, out, quick=given.quick)
    return testing.run(runner, out, given.pytest, core_s=given.core_s)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, target in (("wheels", "gpu-wheels"), ("test", "test-gpu"), ("bench", "bench-gpu")):
        command = commands.add_parser(name, allow_abbrev=False)
        command.set_defaults(target=target)
        command.add_argument("--wheels", type=Path, default=ROOT / ".cache" / "gpu-wheels", help="the folder of wheels")
        command.add_argument("--cuda", default="13", help="the major version that UCX is for")
        if name == "wheels":
            command.add_argument("--python", default="3.12", help="of the machine with the GPU")
            command.add_argument("--has", default="", help="packages that it has already")
            command.add_argument("--limit-mib", type=float, default=wheels.LIMIT_MIB)
            continue
        command.add_argument("--out", type=Path, default=ROOT / "build" / "gpu" / "results", help="for the results")
        command.add_argument("--total-s", type=float, default=560, help="for the environment and all parts together")
        if name == "bench":
            command.add_argument("--quick", action="store_true", help="small sizes, few turns: trust no figure")
        else:
            command.add_argument("--core-s", type=float, default=200, help="for the tests that need no GPU; 0: none")
            command.add_argument("pytest", nargs="*", help="options of pytest, behind --")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
