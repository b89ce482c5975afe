"""Fuzz what takes bytes of others.

python -m tests.fuzz [TARGET ...] [--seconds N]   fuzz; status 1 where something was found
python -m tests.fuzz seed                         make the seeds of the corpus anew
python -m tests.fuzz replay [FILE ...]            try inputs, or the corpus, and show what they lead to
python -m tests.fuzz list                         the targets
"""

import argparse
import faulthandler
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz import runner
from tests.fuzz.target import Target, try_one

OUT = Path("build/fuzz")


def main() -> int:
    """See above."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", metavar="TARGET", help="only these; or seed, list, replay FILE ...")
    parser.add_argument("--seconds", type=float, default=300, help="of fuzzing, for all targets together")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many targets run at a time")
    parser.add_argument("--seed", type=int, default=None, help="of what is random; a new one each time")
    parser.add_argument("--out", type=Path, default=OUT, help="where findings, and what libFuzzer learns, are kept")
    parser.add_argument("--unguided", action="store_true", help="do without atheris")
    given = parser.parse_args()
    word, *rest = given.words or [""]
    guided = runner.has_atheris() and not given.unguided and word not in ("seed", "list", "replay")
    with runner.watched_imports(guided=guided):
        from tests.fuzz.targets import TARGETS
    named = {target.name: target for target in TARGETS}
    if word == "list":
        print("\n".join(named))
        return 0
    if word == "seed":
        for target in _chosen(named, rest):
            print(f"{target.name}: {runner.write_seeds(target)} seeds")
        return 0
    if word == "replay":
        known = [file for target in TARGETS for file in runner.corpus_of(target)]
        with runner.scratch_folder():
            return _replay(named, [Path(file) for file in rest] or known)
    return _fuzz(_chosen(named, given.words), given, guided)


def _chosen(named: dict[str, Target], names: Sequence[str]) -> list[Target]:
    unknown = sorted(set(names) - named.keys())
    if unknown:
        sys.exit(f"no such target: {', '.join(unknown)} (python -m tests.fuzz list)")
    return [named[name] for name in names] or list(named.values())


def _fuzz(targets: Sequence[Target], given: argparse.Namespace, guided: bool) -> int:
    seed = int.from_bytes(os.urandom(3), "little") if given.seed is None else given.seed
    how = "guided by coverage" if guided else "random mutations: atheris is not installed"
    print(f"{len(targets)} targets, {given.seconds:g} s, seed {seed}, {how}", flush=True)
    inputs, findings = 0, []
    for result in runner.run(targets, given.seconds, out=given.out, jobs=given.jobs, seed=seed, guided=guided):
        print(f"{result.target:20} {result.inputs:9,} inputs, {len(result.findings)} findings", flush=True)
        inputs += result.inputs
        findings += result.findings
    for finding in findings:
        print(f"\n--- {finding.target}: {finding.what}\n{finding.text.rstrip()}")
        print(f"try it again: python -m tests.fuzz replay {finding.file}")
    print(f"\n{inputs:,} inputs, {len(findings)} findings", flush=True)
    return 1 if findings else 0


def _replay(named: dict[str, Target], files: Sequence[Path]) -> int:
    """Try inputs; the folder that a file lies in names its target. A child for each target, which may crash."""
    by_target: dict[str, list[Path]] = {}
    for file in files:
        by_target.setdefault(file.resolve().parent.name, []).append(file)
    bad = 0
    for target in _chosen(named, list(by_target)):
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os._exit(_try_all(target, by_target[target.name]))
        _, status = os.waitpid(child, 0)
        if status:
            bad += 1
            print(f"{target.name}: {runner.how_it_ended(status)}")
    print(f"{len(files)} inputs, findings in {bad} targets")
    return 1 if bad else 0


def _try_all(target: Target, files: Sequence[Path]) -> int:
    faulthandler.enable()
    runner.limit_memory()
    bad = 0
    for file in files:
        print(f"{target.name}: {file}", flush=True)
        try:
            error = try_one(target, file.read_bytes())
        except OSError as unreadable:
            error = unreadable
        if error is not None:
            bad = 1
            traceback.print_exception(error)
    sys.stderr.flush()
    return bad


if __name__ == "__main__":
    sys.exit(main())
