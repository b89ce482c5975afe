"""A job's figures and health over HTTP, and by the command, while processes are well, silent, and gone."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from skipper.control import ActorError, ActorMesh
from skipper.control.observe import PageServer, job_status, metrics_text, report_figures, serve_metrics
from skipper.control.runtime import status_providers
from skipper.control.support.pages import Page
from tests.control.actors import Echo
from tests.control.conftest import PATIENCE_S, REPOSITORY, Script, wait_until
from tests.control.observe.conftest import Skipper
from tests.prometheus import parse


@pytest.fixture
def server() -> Iterator[PageServer]:
    with serve_metrics(timeout=2.0, interval=1e-9) as server:
        yield server


def fetch(url: str) -> dict[str, dict[str, float]]:
    with urlopen(url, timeout=PATIENCE_S) as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        return parse(answer.read().decode())


def health(server: PageServer) -> tuple[int, dict[str, object]]:
    try:
        with urlopen(server.url.replace("/metrics", "/health"), timeout=PATIENCE_S) as answer:
            return answer.status, json.loads(answer.read())
    except HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def of_worker(rank: int, figures: dict[str, float]) -> float:
    (value,) = [value for labels, value in figures.items() if f"workers{{'gpus': {rank}}}" in labels]
    return value


def test_every_process_is_up_and_counts(
    server: PageServer, echoes: ActorMesh[Echo], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_providers._figures, "_by_part", {})
    report_figures("kitchen", lambda: {"eggs": 3})
    before = fetch(server.url)
    with pytest.raises(ActorError):
        echoes.slice(gpus=1).fail.call_one(ValueError("x")).get(PATIENCE_S)
    after = fetch(server.url)
    assert [of_worker(rank, after["skipper_process_up"]) for rank in range(2)] == [1, 1]
    assert of_worker(0, after["skipper_process_resident_bytes"]) > 1 << 20
    for metric, more in (("skipper_actor_handled_total", 1), ("skipper_actor_errors_total", 1)):
        assert of_worker(1, after[metric]) - of_worker(1, before[metric]) == more
    (eggs,) = [value for labels, value in after["skipper_figure"].items() if 'part="kitchen",name="eggs"' in labels]
    assert eggs == 3


def test_a_silent_process_is_down_and_the_job_not_well(server: PageServer, frozen: int) -> None:
    figures = fetch(server.url)
    assert [of_worker(rank, figures["skipper_process_up"]) for rank in range(2)] == [0, 1]
    code, said = health(server)
    assert (code, said["healthy"]) == (503, False)
    assert list(said["silent"]) == ["workers{'gpus': 0}"]  # type: ignore[call-overload]


def test_a_job_whose_processes_answer_is_well(server: PageServer, echoes: ActorMesh[Echo]) -> None:
    echoes.pid.call().get(PATIENCE_S)
    code, said = health(server)
    assert (code, said["healthy"], said["silent"]) == (200, True, {})


def test_scrapes_share_one_look_at_the_job(echoes: ActorMesh[Echo]) -> None:
    with serve_metrics(timeout=5.0, interval=60.0) as server:
        before = fetch(server.url)
        echoes.pid.call().get(PATIENCE_S)
        assert [fetch(server.url) for _ in range(5)] == [before] * 5
        assert health(server)[0] == 200
    for bounds in ({"timeout": 0.0}, {"timeout": float("nan")}, {"interval": 0.0}, {"interval": float("inf")}):
        with pytest.raises(ValueError, match="positive"):
            serve_metrics(**bounds)


def test_prometheus_sends_a_token_that_it_was_given(echoes: ActorMesh[Echo]) -> None:
    with serve_metrics(timeout=5.0, host="0.0.0.0", token="sixteen-letters-or-more") as server:
        url = f"http://127.0.0.1:{server.port}/metrics"
        for path in ("/metrics", "/health"):
            with pytest.raises(HTTPError, match="403") as caught:
                urlopen(url.replace("/metrics", path), timeout=PATIENCE_S)
            assert b"workers" not in caught.value.read()
            caught.value.close()
        scrape = Request(url, headers={"Authorization": "Bearer sixteen-letters-or-more"})
        with urlopen(scrape, timeout=PATIENCE_S) as answer:
            assert of_worker(0, parse(answer.read().decode())["skipper_process_up"]) == 1


def test_a_page_that_fails_is_an_answer_too() -> None:
    def fails() -> Page:
        raise ValueError("secret")

    with PageServer({"/fails": fails, "/works": lambda: Page("text/plain", "works")}) as server:
        for path, code, said in (("fails", 500, "ValueError\n"), ("nothing", 404, "there is /fails and /works\n")):
            with pytest.raises(HTTPError, match=str(code)) as caught:
                urlopen(f"http://127.0.0.1:{server.port}/{path}", timeout=PATIENCE_S)
            assert caught.value.read().decode() == said
            caught.value.close()
        with urlopen(f"http://127.0.0.1:{server.port}/works", timeout=PATIENCE_S) as answer:
            assert answer.read() == b"works"


def test_the_command_prints_what_is_served(skipper: Skipper, echoes: ActorMesh[Echo]) -> None:
    done = skipper("metrics")
    assert (done.returncode, done.stderr) == (0, "")
    assert set(parse(done.stdout)) >= set(parse(metrics_text(job_status())))


def test_the_command_serves_until_the_job_ends(
    script: Callable[[str], Script], runtime_folder: Path, tmp_path: Path
) -> None:
    running = script(
        f"""
        import os, time
        os.environ["XDG_RUNTIME_DIR"] = {str(runtime_folder)!r}
        from skipper import control
        control.serve_job("watched")
        print("served", flush=True)
        time.sleep(60)
        """
    )
    assert running.line() == "served"
    command = [sys.executable, "-m", "skipper.cli.main", "metrics", "--job", "watched", "--serve", "0"]
    token = tmp_path / "token"
    token.write_text("sixteen-letters-or-more\n")
    token.chmod(0o600)
    command += ["--secret-file", str(token)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY
    ) as serving:
        assert serving.stdout is not None
        url = serving.stdout.readline().strip()
        assert url.endswith("/metrics?token=sixteen-letters-or-more")
        assert list(fetch(url)["skipper_process_up"].values()) == [1]
        running.process.kill()
        wait_until(lambda: serving.poll() is not None, "the server ends with the job")
        assert (serving.returncode, serving.communicate()[1]) == (0, "the job has ended\n")
