"""The fuzzer finds what it is there to find: mistakes of every kind, planted in decoders."""

import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from tests.fuzz.mutation import join_parts, mutate_bytes, mutate_json, split_parts
from tests.fuzz.runner import has_atheris

ROOT = Path(__file__).resolve().parents[2]


def python(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=110, check=False
    )


def test_mistakes_of_every_kind_are_found_and_their_inputs_kept(tmp_path: Path) -> None:
    ran = python("-m", "tests.fuzz.planted", str(tmp_path))
    found = dict(line.split(": ", 1) for line in ran.stdout.splitlines())
    assert set(found) == {"careless", "believes", "reads", "walks"}, ran.stdout + ran.stderr
    assert found["careless"].startswith("struct.error: ")
    assert found["believes"].startswith("MemoryError: ")
    assert found["reads"].startswith("killed by SIGSEGV: ")
    assert found["walks"].startswith("took more than 5 s of CPU time")


@pytest.mark.parametrize("how", ["guided", "unguided"])
def test_a_run_that_finds_nothing_succeeds(tmp_path: Path, how: str) -> None:
    if how == "guided" and not has_atheris():
        pytest.skip("atheris is not installed")
    options = ["--unguided"] if how == "unguided" else []
    ran = python("-m", "tests.fuzz", "opening", "--seconds", "1", "--out", str(tmp_path), *options)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.startswith("1 targets")
    assert ran.stdout.rstrip().endswith("0 findings")


def test_an_input_that_is_a_finding_fails_its_replay(tmp_path: Path) -> None:
    good, bad = tmp_path / "url" / "good", tmp_path / "verbs-endpoints" / "bad"
    for file in (good, bad):
        file.parent.mkdir()
    good.write_bytes(b"actor://host:80/name")
    assert python("-m", "tests.fuzz", "replay", str(good)).returncode == 0
    ran = python("-m", "tests.fuzz", "replay", str(bad))
    assert ran.returncode == 1
    assert "FileNotFoundError" in ran.stderr


def test_mutations_come_from_the_seed_alone_and_parts_stay_parts() -> None:
    parts = [b"one", b"", b"three"]
    assert split_parts(join_parts(*parts)) == parts
    for mutate, data in ((mutate_bytes, join_parts(*parts)), (mutate_json, b'{"a": [1, {"b": "c"}]}')):
        first, again = ([mutate(data, random) for _ in range(200)] for random in (Random(3), Random(3)))
        assert first == again
        assert len(set(first)) > 50
