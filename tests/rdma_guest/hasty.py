"""A peer that soon gives a port that had no way to an owner another chance."""

from dataplane.backends import verbs_peer
from tests.conformance.owner import main

if __name__ == "__main__":
    verbs_peer._AVOID_S = 1.0
    main()
