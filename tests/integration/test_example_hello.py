"""The README's first script."""

from __future__ import annotations

from tests.integration.example_process import ROOT, run


def test_a_worker_reads_the_memory_of_another() -> None:
    example = run("examples/hello_mesh.py", timeout=30.0)
    assert example.process.returncode == 0, example.stderr
    assert example.stdout == "worker 0 reads from worker 1: [1.0, 1.0, 1.0, 1.0]\n"
    assert example.stderr == ""


def test_it_fits_on_one_screen() -> None:
    lines = (ROOT / "examples" / "hello_mesh.py").read_text().splitlines()
    code = [line for line in lines if line.strip() and not line.strip().startswith(('"""', "#"))]
    assert len(code) <= 20
