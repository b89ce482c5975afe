"""``python -m tests.simulation``; see the package."""

from tests.simulation.program import main

if __name__ == "__main__":
    main()
