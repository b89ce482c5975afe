"""What `join` takes as an address, and what it refuses."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from skipper.control import JobNotFoundError, ServedJob, serve_job
from skipper.control.api.join import find
from skipper.control.runtime import current_runtime


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedJob]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with serve_job("tests") as served:
        yield served


def test_with_several_jobs_one_has_to_be_named(served: ServedJob) -> None:
    with serve_job("second"), pytest.raises(JobNotFoundError, match="there are second, tests"):
        find(None)


def test_a_path_is_a_path_whatever_it_looks_like(served: ServedJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(served.path.parent)
    for address in ("tests", str(served.path), served.path, Path(served.path.name)):
        assert find(address).root == current_runtime.current().me


def test_an_address_is_never_taken_for_the_content_of_a_file(served: ServedJob) -> None:
    content = served.environment(inline=True)["SKIPPER_JOB"]
    with pytest.raises(JobNotFoundError) as caught:
        find(content)
    assert current_runtime.current().secret.hex() not in str(caught.value)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "tcp://127.0.0.1:1", "tcp://[::1]:1"])
def test_a_host_and_a_port_are_those_of_a_job_on_another_host(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SKIPPER_CERTS", "SKIPPER_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="need a common secret"):
        find(address)


def test_without_any_job_the_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("SKIPPER_JOB", raising=False)
    with pytest.raises(JobNotFoundError, match=f"there is none in {tmp_path}"):
        find(None)


@pytest.mark.parametrize("address", ["nobody", "no/such/job", "two words", "/no/such/folder/job.json"])
@pytest.mark.usefixtures("served")
def test_an_address_that_leads_nowhere_is_a_lookup_error(address: str) -> None:
    with pytest.raises(LookupError):
        find(address)
