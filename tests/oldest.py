"""Run the core of the suite with the oldest packages that `pyproject.toml` claims: python -m tests.oldest [ARGUMENTS]

The arguments are pytest's. The oldest torch comes with CUDA alone: the environment takes some gigabytes.
"""

import os
import re
import subprocess
import sys
import tomllib
import venv
from typing import NoReturn

from tests.tree import CORE, ROOT, chosen, copy_tree, pins_beside

FOLDER = ROOT / "build" / "oldest"
_BOUND = re.compile(r"(?P<name>[\w-]+)>=(?P<version>[\d.]+)")
_VERSIONS = "import importlib.metadata as m, sys; print(*(f'{n} {m.version(n)}' for n in sys.argv[1:]), sep=', ')"


def main() -> NoReturn:
    """See above."""
    tree, programs = FOLDER / "tree", FOLDER / "venv" / "bin"
    copy_tree(tree)
    bounds = oldest((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    pins = [f"{name}=={version}" for name, version in bounds.items()]
    constraints = FOLDER / "constraints.txt"
    constraints.write_text("\n".join([*pins, *pins_beside(bounds)]) + "\n", encoding="utf-8")
    if not programs.exists():
        venv.create(programs.parent, with_pip=True)
    pip = [str(programs / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "-c", str(constraints), "-e", f"{tree}[test,cu12]"], check=True)
    subprocess.run([str(programs / "python"), "-c", _VERSIONS, *bounds], check=True)
    command = [str(programs / "python"), "-m", "pytest", "-p", "no:cacheprovider", *chosen(sys.argv[1:], CORE)]
    os.chdir(tree)
    os.execv(command[0], command)  # so that what ends this ends the tests


def oldest(project: str) -> dict[str, str]:
    """The lower bound of each package that the text of a `pyproject.toml` requires."""
    bounds = {}
    for requirement in tomllib.loads(project)["project"]["dependencies"]:
        found = _BOUND.match(requirement)
        if found is None:
            raise ValueError(f"pyproject.toml has no lower bound in {requirement!r}")
        bounds[found["name"]] = found["version"]
    return bounds


if __name__ == "__main__":
    main()
