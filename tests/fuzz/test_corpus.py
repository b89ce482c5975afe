"""Every input of the corpus, the seeds and those that were findings once, leads to nothing that must not be."""

import subprocess
import sys
from pathlib import Path

from tests.fuzz.runner import CORPUS

ROOT = Path(__file__).resolve().parents[2]


def test_no_input_of_the_corpus_is_a_finding() -> None:
    command = [sys.executable, "-m", "tests.fuzz", "replay"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr


def test_each_target_has_seeds_and_each_folder_a_target() -> None:
    listed = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "list"], cwd=ROOT, capture_output=True, text=True, timeout=110, check=True
    )
    assert {folder.name for folder in CORPUS.iterdir()} == set(listed.stdout.split())
    assert all(list(folder.glob("seed-*")) for folder in CORPUS.iterdir())
