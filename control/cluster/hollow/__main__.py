"""``python -m skipper.control.cluster.hollow``; see `program`."""

from skipper.control.cluster.hollow.program import main

if __name__ == "__main__":
    main()
