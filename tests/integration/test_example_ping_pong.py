"""Two actors that write into each other's memory."""

from __future__ import annotations

from tests.integration.example_process import ExampleProcess, run


def play(*options: str) -> ExampleProcess:
    example = run("examples/ping_pong.py", "--rounds", "3", "--sizes", "4096", "1048576", *options, timeout=60.0)
    assert example.process.returncode == 0, example.stderr
    assert example.stderr == ""
    return example


def backends(example: ExampleProcess) -> list[list[str]]:
    return [line.split()[:2] for line in example.stdout.splitlines()[1:3]]


def test_tensors_go_back_and_forth_through_memory_that_both_map() -> None:
    example = play()
    assert backends(example) == [["4096", "shm"], ["1048576", "shm"]]
    assert example.stdout.splitlines()[-1] == "6 strokes of each size, every element as expected after each"


def test_they_do_with_memory_of_torch_itself_too() -> None:
    assert backends(play("--plain")) == [["4096", "ucx"], ["1048576", "ucx"]]


def test_a_stroke_that_left_something_behind_is_an_error() -> None:
    script = (
        "import examples.ping_pong as game, torch\n"
        "class Careless(game.Player):\n"
        "    @game.endpoint\n"
        "    def hit(self, number, theirs):\n"
        "        self.ball.copy_(self.inbox + 1)[-1] -= 1\n"
        "        theirs.write_from(self.ball, timeout=10).get()\n"
        "game.Player = Careless\n"
        "game.main(['--rounds', '1', '--sizes', '4096'])\n"
    )
    example = run("-c", script, timeout=60.0)
    assert example.process.returncode == 1
    assert "expected 2 in every element, found 1.0 to 2.0" in example.stderr
