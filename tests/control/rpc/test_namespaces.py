import os
import subprocess
import sys
import threading

import pytest

from skipper.control import Actor, endpoint, this_host
from skipper.control.api import namespaces
from skipper.control.rpc import JOB_ID_VARIABLE, NAMESPACE_VARIABLE, environment, job_id, namespace, use_namespace
from tests.control.rpc.parties import PATIENCE_S, REPOSITORY


class Probe(Actor):
    @endpoint
    def where(self) -> tuple[str, str]:
        return namespace(), job_id()

    @endpoint
    def where_a_child_is(self) -> str:
        code = "from skipper.control.rpc import namespace; print(namespace())"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE_S, check=True
        )
        return done.stdout.strip()


def test_the_namespace_is_that_of_the_environment_or_else_the_id_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (NAMESPACE_VARIABLE, JOB_ID_VARIABLE) == ("SKIPPER_NAMESPACE", "SKIPPER_JOB_ID")
    own = namespace()
    assert own == job_id() == namespace()
    monkeypatch.setenv("SKIPPER_JOB_ID", "job-7")
    assert (namespace(), job_id()) == ("job-7", "job-7")
    monkeypatch.setenv("SKIPPER_NAMESPACE", "user-rl-leader-123")
    assert (namespace(), job_id()) == ("user-rl-leader-123", "job-7")
    assert environment() == {"SKIPPER_NAMESPACE": "user-rl-leader-123", "SKIPPER_JOB_ID": "job-7"}


def test_a_block_has_a_namespace_of_its_own_in_its_thread_alone() -> None:
    outside = namespace()
    seen: list[str] = []
    with use_namespace("inner") as name:
        assert name == namespace() == environment()["SKIPPER_NAMESPACE"] == "inner"
        thread = threading.Thread(target=lambda: seen.append(namespace()))
        thread.start()
        thread.join()
    assert [namespace(), *seen] == [outside, outside]


def test_children_are_in_the_namespace_of_their_parent_unless_they_are_given_another() -> None:
    with use_namespace("shared"):
        procs = this_host().spawn_procs()
    own = this_host().spawn_procs(env={"SKIPPER_NAMESPACE": "of-its-own"})
    inherited = this_host().spawn_procs()
    try:
        probe = procs.spawn("probe", Probe)
        assert probe.where.call_one().get(PATIENCE_S) == ("shared", job_id())
        assert probe.where_a_child_is.call_one().get(PATIENCE_S) == "shared"  # and so on down the tree
        assert own.spawn("probe", Probe).where.call_one().get(PATIENCE_S) == ("of-its-own", job_id())
        assert inherited.spawn("probe", Probe).where.call_one().get(PATIENCE_S) == (job_id(), job_id())
        assert "SKIPPER_NAMESPACE" not in os.environ
    finally:
        for mesh in (procs, own, inherited):
            mesh.stop().get(PATIENCE_S)


def test_names_are_meant_in_a_namespace_unless_they_are_absolute() -> None:
    assert namespaces.absolute("trainer/0", "job-7") == "/job-7/trainer/0"
    assert namespaces.absolute("trainer", "/") == "/trainer"
    assert namespaces.absolute("/shared/curriculum", "job-7") == "/shared/curriculum"


@pytest.mark.parametrize("name", ["", "/", "a//b", "a/", "//a", "a b", "a\n", "../a", ".a", "-a", "ä", "x" * 513])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is not a name"):
        namespaces.check_name(name)


def test_what_is_no_namespace_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("/a", "a b"):
        with pytest.raises(ValueError, match="is not a name"), use_namespace(name):
            pass
    monkeypatch.setenv("SKIPPER_NAMESPACE", "/a")
    with pytest.raises(ValueError, match="is not a namespace"):
        namespace()
