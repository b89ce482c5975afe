"""A script whose actors come up one after another, while it and they print."""

import sys
import time
from pathlib import Path

from skipper.control import Actor, context, endpoint, this_host


class Slow(Actor):
    """Rank r is there after the file r of a folder."""

    def __init__(self, folder: str) -> None:
        rank = context().actor_instance.rank.rank
        while not (Path(folder) / str(rank)).exists():
            time.sleep(0.01)

    @endpoint
    def say(self, text: str) -> None:
        """Print."""
        print(text)


def main(folder: str) -> None:
    """Let rank 0 come, print, and let the others come."""
    actors = this_host().spawn_procs({"gpus": 3}, name="trainers").spawn("trainers", Slow, folder)
    (Path(folder) / "0").touch()
    actors.slice(gpus=0).say.call("rank 0 is there").get()
    print("a line of the script")
    sys.stdin.readline()
    for rank in (1, 2):
        (Path(folder) / str(rank)).touch()
    actors.initialized.get()
    print("all are there")


if __name__ == "__main__":
    main(sys.argv[1])
