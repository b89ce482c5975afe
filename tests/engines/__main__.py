"""Run the tests with a real vLLM: python -m tests.engines [ARGUMENTS]

The arguments are pytest's; behind the word ``soak`` they are those of `tests.engines.soak`, behind ``pauses`` those of
`tests.engines.pauses`. The environment is in
``.cache/engines``; without a network and without it, this says so and ends with code 2.
"""

import os
import sys
from typing import NoReturn

from tests.engines.environment import FOLDER, NotInstalledError, prepare
from tests.tree import chosen


def main() -> NoReturn:
    """See above."""
    try:
        tree = prepare()
    except NotInstalledError as error:
        print(f"the tests with a real vLLM were not run, for want of an environment: {error}", file=sys.stderr)
        sys.exit(2)
    python = str(FOLDER / "venv" / "bin" / "python")
    os.chdir(tree)
    if sys.argv[1:2] in (["soak"], ["pauses"]):
        command = [f"tests.engines.{sys.argv[1]}", *sys.argv[2:]]
    else:
        command = ["pytest", "-p", "no:cacheprovider", *chosen(sys.argv[1:], ("tests/engines",))]
    os.execv(python, [python, "-m", *command])  # so that what ends this ends the tests


if __name__ == "__main__":
    main()
