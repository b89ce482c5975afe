"""`python -m tests.structure` shows how the package is built, and finds each kind of violation and who it is."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.structure.__main__ import LIMITS, ROOT, main

Check = Callable[[Mapping[str, str]], list[str]]

LAYERS = '[layers]\ninside = "house.control"\nupwards = [["model"], ["wire"], ["services", "observe"]]\n'

SOUND = {
    "control/model/shape.py": "class Shape:\n    _axes = ()\n",
    "control/wire/link.py": "from house.control.model.shape import Shape\n",
    "control/services/service.py": "def serve():\n    from house.control.wire import link\n",
    "control/observe/status.py": "from ..wire import link\n",
    "store/client.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house import store\n",
    "store/copy.pyi": "class Block: ...\n",
    "store/copy.pyx": "from house.store import client\ncdef class Block:\n    cdef int _n\n",
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return tmp_path / "house"


@pytest.fixture
def check(package: Path, capsys: pytest.CaptureFixture[str]) -> Check:
    """The errors for a sound package with these files in it; "limits" are lines for its limits."""

    def errors(files: Mapping[str, str]) -> list[str]:
        for name, text in {**SOUND, **files}.items():
            path = package / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        for folder in (package, *(each for each in package.rglob("*") if each.is_dir())):
            (folder / "__init__.py").touch()
        limits = package.with_name("limits.toml")
        limits.write_text(LAYERS + files.get("limits", ""))
        status = main(["--package", str(package), "--limits", str(limits)])
        printed = capsys.readouterr().err.splitlines()
        assert status == bool(printed)
        return printed

    return errors


def test_the_house_is_as_its_limits_say() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.structure"], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    rooms = {line.split()[0] for line in done.stdout.split("\n\n")[0].splitlines()[1:]}
    assert rooms == {
        "skipper", "control", "dataplane", "tensor_engine", "torchstore", "benchmarks", "cli", "commandline", "trust"
    }  # fmt: skip
    for layer in ("model", "support", "wire", "runtime", "api", "services", "cluster", "observe", "rpc"):
        assert f"\n  {layer} " in done.stdout


def test_a_sound_package_passes(check: Check) -> None:
    assert check({}) == []


def test_a_circle_by_an_import_within_a_function_is_found(check: Check) -> None:
    head, members, *way = check({"control/model/shape.py": "def f():\n    from house.control.wire import link\n"})
    assert head == "error: control: modules in circles at run time: 2, and the limit is 0"
    assert members == "  2 modules: control.model.shape, control.wire.link"
    assert "      control.model.shape -> control.wire.link (call; control/model/shape.py:2)" in way


def test_a_circle_by_import_module_is_found(check: Check) -> None:
    hidden = "from importlib import import_module\ndef f():\n    return import_module('house.store.client')\n"
    found = check({"store/client.py": "import house.store.plan\n", "store/plan.py": hidden})
    assert found[:2] == [
        "error: store: modules in circles at run time: 2, and the limit is 0",
        "  2 modules: store.client, store.plan",
    ]


def test_a_circle_through_a_compiled_module_is_found(check: Check) -> None:
    found = check({"store/client.py": "from house.store.copy import Block\n"})
    assert "      store.copy -> store.client (run; store/copy.pyx:1)" in found


@pytest.mark.parametrize(("size", "is_found"), [(5, False), (6, True)])
def test_a_circle_for_type_checkers_is_found_if_it_is_large(size: int, is_found: bool, check: Check) -> None:
    names = [f"part{number}" for number in range(size)]
    after = {name: names[(number + 1) % size] for number, name in enumerate(names)}
    guarded = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import house.store.{}\n"
    found = check({f"store/{name}.py": guarded.format(other) for name, other in after.items()})
    if not is_found:
        assert found == []
        return
    assert found[0] == "error: store: largest circle with types: 6, and the limit is 5"
    assert found[1] == f"  6 modules: {', '.join(f'store.{name}' for name in names)}"


@pytest.mark.parametrize(
    ("module", "line", "kind", "when"),
    [
        ("control/wire/link.py", "import house.control.services.service", "run", "at run time"),
        ("control/wire/link.py", "def f(): import house.control.services.service", "call", "at run time"),
        ("control/wire/link.pyi", "import house.control.services.service", "types", "for types"),
        ("control/observe/status.py", "import house.control.services.service", "run", "at run time"),
    ],
)
def test_an_import_against_the_layers_is_found(module: str, line: str, kind: str, when: str, check: Check) -> None:
    found = check({module: line, "control/services/service.py": ""})
    name = module.partition(".")[0].replace("/", ".")
    file = module if kind != "types" else "control/wire/link.py"
    assert found == [
        f"error: against the layers {when}: 1, and the limit is 0",
        f"  {name} -> control.services.service ({kind}; {file}:1)",
    ]


def test_a_layer_that_imports_the_front_of_its_package_is_found(check: Check) -> None:
    found = check({"control/wire/link.py": "from house import control\n"})
    assert found[1] == "  control.wire.link -> control (run; control/wire/link.py:1)"


def test_a_folder_in_no_layer_is_found(check: Check) -> None:
    (found,) = check({"control/extras/more.py": ""})
    assert found.startswith("error: house.control.extras is in no layer")


_EAGER = {"store/__init__.py": "from house.store import first\n", "store/first.py": "from house.store import client\n"}


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("def f():\n    from house.store.client import serve\n", True),
        ("def f():\n    import house.store.client\n", True),
        ("def f():\n    from house.store import client\n", False),
        ("def f():\n    from house.store.copy import Block\n", False),  # the package's front does not import it
        ("from house import store\ndef f():\n    from house.store.client import serve\n", False),
        ("from house.store.client import serve\n", False),
    ],
)
def test_a_late_import_that_two_threads_can_break_is_found(line: str, is_found: bool, check: Check) -> None:
    found = check({**_EAGER, "store/client.py": "def serve(): ...\n", "control/services/service.py": line})
    where = "  control.services.service -> store.client (call; control/services/service.py:2)"
    assert found == (["error: late imports that two threads can break: 1, and the limit is 0", where] * is_found)


def test_one_name_for_two_classes_is_found(check: Check) -> None:
    found = check({"store/client.py": "class Shape: ...\nclass _Own: ...\n", "store/plan.py": "class _Own: ...\n"})
    assert found == [
        "error: class names of several classes: 1, and the limit is 0",
        "  Shape: control.model.shape, store.client",
    ]


def test_one_name_for_several_classes_can_be_explained_below_one_package(check: Check) -> None:
    reason = '["class names that are explained"]\nShape = { below = "house.store", why = "each backend has one" }\n'
    backends = {"store/one.py": "class Shape: ...\n", "store/two.py": "class Shape: ...\n", "limits": reason}
    found = check({**backends, "control/model/shape.py": ""})
    assert found == []
    found = check(backends)
    assert found[1] == "  Shape: control.model.shape, store.one, store.two"
    found = check({**backends, "control/model/shape.py": "", "store/two.py": ""})
    assert found == ["error: limits: there are no two classes Shape below house.store any more: remove the line"]


@pytest.mark.parametrize(
    "line",
    ["def f(shape): return shape._axes", "def f(): return Shape()._axes", "class A:\n  def f(self): self.s._axes = 1"],
)
def test_a_private_name_of_another_module_is_found(line: str, check: Check) -> None:
    head, where = check({"store/client.py": f"from house.control.model.shape import Shape\n{line}\n"})
    assert head == "error: store: private names of others: 1, and the limit is 0"
    assert where.startswith("  store/client.py:")
    assert where.endswith("._axes")


def test_an_import_of_a_private_name_is_found(check: Check) -> None:
    found = check({"store/plan.py": "def _cut(): ...\n", "store/client.py": "from house.store.plan import _cut\n"})
    assert found[1] == "  store/client.py:1: house.store.plan._cut"


@pytest.mark.parametrize(
    "text",
    [
        "class A:\n  def f(self): return self._axes\n",
        "class A:\n  def f(self): return super()._axes + type(self)._axes\n",
        "class A:\n  def __init__(self, other): self._axes = other._axes\n",
        "import os\nos._axes(1)\n",  # of another library
        "def f(shape): return shape._nobody_defines_this\n",  # likewise
    ],
)
def test_private_names_of_ones_own_and_of_libraries_are_not_counted(text: str, check: Check) -> None:
    assert check({"store/client.py": text}) == []


def test_a_limit_that_is_too_high_is_found_and_can_be_lowered(
    check: Check, package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = '[limits."private names of others"]\nstore = 3\ncontrol = 1\n'
    files = {"store/client.py": "def f(shape): return shape._axes\n", "limits": limits}
    assert check(files) == [
        "error: control: private names of others: 0, which is better than the limit of 1: lower it (--lower)",
        "error: store: private names of others: 1, which is better than the limit of 3: lower it (--lower)",
    ]
    path = package.with_name("limits.toml")
    assert main(["--package", str(package), "--limits", str(path), "--lower"]) == 0
    assert "lowered: private names of others of store: 3 -> 1" in capsys.readouterr().out
    assert path.read_text() == LAYERS + '[limits."private names of others"]\nstore = 1\n'


def test_a_limit_is_never_raised(check: Check, package: Path) -> None:
    check({"store/client.py": "def f(shape): return shape._axes\n"})
    path = package.with_name("limits.toml")
    assert main(["--package", str(package), "--limits", str(path), "--lower"]) == 1
    assert path.read_text() == LAYERS


def test_a_violation_planted_in_the_house_itself_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    house = tmp_path / "skipper"
    shutil.copytree(ROOT / "src" / "skipper", house, ignore=shutil.ignore_patterns("*.so", "*.c", "__pycache__"))
    settings = house / "control" / "model" / "settings.py"
    settings.write_text(settings.read_text() + "\n\ndef planted() -> None:\n    import skipper.control.wire.link\n")
    assert main(["--package", str(house), "--limits", str(LIMITS)]) == 1
    assert "control.model.settings -> control.wire.link (call; control/model/settings.py:" in capsys.readouterr().err
