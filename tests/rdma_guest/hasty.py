"""A peer that soon gives a port that had no way to an owner another chance."""

from skipper.dataplane.backends.verbs import connector
from tests.conformance.owner import main

if __name__ == "__main__":
    connector._AVOID_S = 1.0
    main()
