"""A plain DDP script as an actor: the processes stay, the training is started on them as often as one likes.

    python -m examples.spmd_training
    python -m examples.spmd_training --procs 4

The first call trains, the second goes on from the checkpoint with a smaller step, in the same processes: torch is
imported once. `notebook.ipynb` does it from a notebook.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

# So that `python examples/spmd_training.py` works as well as `python -m examples.spmd_training`.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from skipper.control import SpmdActor, shutdown, this_host

SCRIPT = Path(__file__).with_name("plain_ddp.py")


def main() -> int:
    """Run it as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--procs", type=int, default=2, help="how many ranks (default: %(default)s)")
    given = parser.parse_args()
    procs = this_host().spawn_procs({"gpus": given.procs}, env={"OMP_NUM_THREADS": "1"})
    trainers = procs.spawn("trainers", SpmdActor, SCRIPT)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = f"{folder}/model.pt"
        for rate in ("0.1", "0.02"):
            begin = time.monotonic()
            trainers.run.call("--steps", 20, "--lr", rate, "--checkpoint", checkpoint).get(timeout=300)
            print(f"{given.procs} ranks at rate {rate}: {time.monotonic() - begin:.1f} s", flush=True)
    shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
