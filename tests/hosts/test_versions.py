"""Two Skippers of different minor versions in one job, and what is said where versions do not go together."""

import importlib.metadata
import pickle
from pathlib import Path

import pytest

from skipper.control import ActorMesh
from skipper.control.cluster.hosts import attach_to_hosts
from skipper.control.model.errors import HostMismatchError
from skipper.control.runtime.messages import OwnerRef
from skipper.control.wire import version
from skipper.control.wire.process_ref import ProcessRef
from skipper.control.wire.version import MAJOR, MINOR, VERSION, obstacle
from tests.control.conftest import PATIENCE_S
from tests.hosts.actors import Worker
from tests.hosts.conftest import LocalAgents

LATER = Path(__file__).parent / "later"


class Versions(Worker):
    """Tells what its process is."""

    from skipper.control import endpoint

    @endpoint
    def version(self) -> tuple[str, str, str]:
        """The protocol, the library, and the class of the messages of calls."""
        from skipper.control.wire import messages

        return version.VERSION, importlib.metadata.version("skipper-mesh"), messages.Call.__module__


def test_a_script_and_a_host_of_a_later_minor_version_work_together(
    local_agent: LocalAgents, secret_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(LATER))
    later = local_agent("127.0.0.2")
    monkeypatch.delenv("PYTHONPATH")
    hosts = attach_to_hosts([later, local_agent("127.0.0.3")], secret_file=secret_file)
    workers = hosts.spawn_procs(per_host={"gpus": 2}).spawn("workers", Versions)
    there, here = workers.slice(gpus=0).version.call().get(PATIENCE_S)
    assert there == (f"{MAJOR}.{MINOR + 1}", "9.9.9", "sitecustomize")
    assert here == (VERSION, importlib.metadata.version("skipper-mesh"), "skipper.control.wire.messages")
    pids = list(workers.pid.call().get(PATIENCE_S))
    assert len(set(pids)) == 4
    for asker, asked in ((0, 1), (1, 0)):  # what either says arrives with the other
        answers = workers.slice(hosts=asker, gpus=0).ask.call_one(workers.slice(hosts=asked)).get(PATIENCE_S)
        assert answers == pids[2 * asked : 2 * asked + 2]
        below: ActorMesh = workers.slice(hosts=asker, gpus=0).spawn_below.call_one().get(PATIENCE_S)
        (pid,) = below.pid.call().get(PATIENCE_S)
        assert workers.slice(hosts=asked, gpus=1).ask.call_one(below).get(PATIENCE_S) == [pid]
    hosts.stop().get(PATIENCE_S)


def test_a_host_of_another_major_version_is_refused_with_both_named(
    local_agent: LocalAgents, secret_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "from skipper.control.wire import version\n"
        "version.MAJOR, version.VERSION = version.MAJOR + 1, f'{version.MAJOR + 1}.{version.MINOR}'\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    later = local_agent()
    monkeypatch.delenv("PYTHONPATH")
    with pytest.raises(HostMismatchError, match=rf"{MAJOR + 1}\.{MINOR} and {VERSION} of the protocol do not"):
        attach_to_hosts(later, secret_file=secret_file)


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (VERSION, None),
        (f"{MAJOR}.{MINOR + 3}", None),
        (f"{MAJOR + 1}.0", f"{MAJOR + 1}.0 is that of a later"),
        (f"{MAJOR - 1}.9", f"{VERSION} is that of a later"),
        ("4", "the version of the other process"),
        ("", "the version of the other process"),
        ("5.x", "the version of the other process"),
        (None, "the version of the other process"),
        (b"5.0", "the version of the other process"),
        ("9" * 5000 + ".0", "the version of the other process"),
    ],
)
def test_what_stands_between_two_versions(theirs: object, words: str | None) -> None:
    why = obstacle(theirs)
    assert why is None if words is None else why is not None and words in why


def test_what_was_pickled_with_fewer_fields_or_more_is_understood() -> None:
    process = ProcessRef("job-1", "unix-abstract:x", "name")
    owner = pickle.loads(pickle.dumps(OwnerRef(process, 7)))
    assert owner == OwnerRef(process, 7)
    process.__class__.__setstate__(owner.process, ["job-2", "", "old"])  # type: ignore[attr-defined]
    assert (owner.process.id, owner.process.name, owner.process.launcher) == ("job-2", "old", None)
    process.__class__.__setstate__(owner.process, ["job-3", "", "new", None, "what is not known here"])  # type: ignore[attr-defined]
    assert owner.process.id == "job-3"
