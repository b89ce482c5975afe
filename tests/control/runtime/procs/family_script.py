"""A script whose actor has a family of processes: ``family_script.py PRELOADED*``. Ends after a line of input."""

import os
import sys

from skipper.control import configure, this_host
from tests.control.families import Family

if __name__ == "__main__":
    os.setsid()
    configure(preload=sys.argv[1:])
    procs = this_host().spawn_procs()
    worker, pids = procs.spawn("family", Family).make.call_one().get(60)
    print(worker, *pids, flush=True)
    input()
