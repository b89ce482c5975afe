"""Under which secrets handles are proved, and who knows them."""

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skipper import dataplane, trust
from skipper.dataplane import ConfigurationError, DescriptorError, RDMABuffer, TransferTimeoutError, process
from skipper.dataplane.backends.ucx.peer import UcxPeer
from skipper.dataplane.config import Config
from skipper.dataplane.keys import Key, Keys
from tests.conformance.owner import RemoteOwner
from tests.dataplane.scripts import ROOT

SECRET = b"sixteen bytes or more"
NOBODY = 65534
READ = (
    "import sys, numpy as np; from skipper import dataplane\n"
    "raw = sys.stdin.buffer.read()\n"
    "try: buffer = dataplane.RDMABuffer.deserialize(raw)\n"
    "except (dataplane.DescriptorError, dataplane.ConfigurationError) as error: print(type(error).__name__, error)\n"
    "else:\n"
    "    into = np.zeros(buffer.nbytes, np.uint8)\n"
    "    try: buffer.read_into(into).get()\n"
    "    except dataplane.DataplaneError as error: print(type(error).__name__)\n"
    "    else: print(into[0])\n"
)


@pytest.fixture
def clean() -> Iterator[None]:
    """No job, and no secret but the user's, before and after."""
    before = process.current().keys
    process.current().keys = Keys(None)
    yield
    trust.leave_job()
    process.current().keys = before


def elsewhere(raw: bytes, before: str = "", **options: object) -> str:
    """What another process of this host says of a handle."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", before + READ],
        input=raw,
        cwd=ROOT,
        capture_output=True,
        timeout=60,
        **options,  # type: ignore[call-overload]
    )
    assert done.returncode == 0, done.stderr.decode()
    return str(done.stdout.decode()).strip()


def made(value: int = 7) -> tuple[object, bytes]:
    array = dataplane.empty_array(100, np.uint8)
    array[:] = value
    return array, RDMABuffer(array).serialize()


@pytest.mark.usefixtures("clean")
def test_processes_of_one_user_need_no_secret_of_their_own() -> None:
    _keep, raw = made()
    assert elsewhere(raw) == "7"


@pytest.mark.usefixtures("clean")
def test_what_is_made_in_a_job_is_good_in_that_job_and_for_the_user_alone(tmp_path: Path) -> None:
    trust.enter_job(SECRET)
    _keep, raw = made()
    as_another = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}  # a user whose secret is another
    join = "from skipper import trust; trust.enter_job({!r})\n"
    assert elsewhere(raw) == "7"  # no part of the job, such as a child that multiprocessing has spawned
    assert elsewhere(raw, join.format(SECRET), env=as_another) == "7"
    assert elsewhere(raw, join.format(b"that of another job"), env=as_another).startswith("DescriptorError")
    assert "dataplane.configure(secret=" in elsewhere(raw, env=as_another)


@pytest.mark.usefixtures("clean")
def test_the_proof_follows_the_job_that_the_process_is_in() -> None:
    array = dataplane.empty_array(100, np.uint8)
    buffer = RDMABuffer(array)
    names = []
    for secret in (None, SECRET, b"that of a second job", None):
        trust.leave_job() if secret is None else trust.enter_job(secret)
        pickle.loads(pickle.dumps(buffer)).read_into(bytearray(100)).get()
        names.append(process.current().keys.derived(b"something"))
    assert names[0] == names[3]
    assert len(set(names)) == 3


@pytest.mark.usefixtures("clean")
def test_both_sides_may_be_given_a_secret(tmp_path: Path) -> None:
    process.current().keys = Keys(SECRET)
    _keep, raw = made()
    elsewhere_configured = f"from skipper import dataplane; dataplane.configure(secret={SECRET!r})\n"
    assert elsewhere(raw, elsewhere_configured, env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}) == "7"
    assert elsewhere(raw).startswith("DescriptorError")


def test_a_file_that_the_environment_names_holds_the_secret(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    path.chmod(0o600)
    before = process.current().keys
    process.current().keys = Keys(SECRET)
    try:
        _keep, raw = made()
    finally:
        process.current().keys = before
    named = {**os.environ, trust.SECRET_VARIABLE: str(path)}
    assert elsewhere(raw, env=named) == "7"
    path.chmod(0o644)
    said = elsewhere(raw, env=named)
    assert said.startswith("ConfigurationError")
    assert "0600" in said
    assert SECRET.decode() not in said


@pytest.mark.usefixtures("clean")
def test_a_job_needs_no_file(tmp_path: Path) -> None:
    trust.enter_job(SECRET)
    _keep, raw = made()
    squatted = {**os.environ, trust.SECRET_VARIABLE: str(tmp_path / "not there")}
    assert elsewhere(raw, f"from skipper import trust; trust.enter_job({SECRET!r})\n", env=squatted) == "7"


def as_another_user(do: Callable[[], bytes]) -> bytes:
    """What a forked copy of this process gives that is nobody, with a folder of its own."""
    folder = tempfile.mkdtemp()
    os.chown(folder, NOBODY, NOBODY)
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        os.environ["XDG_RUNTIME_DIR"] = folder
        try:
            os.write(there, do())
        except Exception as error:  # noqa: BLE001 - the parent looks at it
            os.write(there, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(there)
    with os.fdopen(here, "rb") as file:
        said = file.read()
    os.waitpid(child, 0)
    shutil.rmtree(folder)
    return said


@pytest.mark.skipif(os.geteuid() != 0, reason="to be another user needs root")
@pytest.mark.usefixtures("clean")
def test_another_user_cannot_use_a_handle_nor_make_one() -> None:
    array, raw = made()

    def use() -> bytes:
        RDMABuffer.deserialize(raw).read_into(bytearray(100)).get()
        return b"read"

    assert as_another_user(use).startswith(b"DescriptorError: this buffer handle was made under a secret")
    forged = as_another_user(lambda: made()[1])
    with pytest.raises(DescriptorError, match="another user"):
        RDMABuffer.deserialize(forged)
    assert (np.asarray(array) == 7).all()


def test_the_user_s_file_is_made_once_by_many_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv(trust.SECRET_VARIABLE, raising=False)
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(trust.user_secret())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(found) == 8
    (file,) = (tmp_path / "skipper").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_may_enter_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv(trust.SECRET_VARIABLE, raising=False)
    (tmp_path / "skipper").mkdir()
    (tmp_path / "skipper").chmod(0o755)
    with pytest.raises(trust.PrivateFileError, match="0755"):
        trust.user_secret()
    with pytest.raises(ConfigurationError, match=trust.SECRET_VARIABLE):
        Keys(None).seal(b"card", b"body")


@pytest.mark.parametrize("secret", ["text of some length", b"short", bytearray(32), 5])
def test_what_cannot_be_a_secret_is_refused_and_not_repeated(secret: object) -> None:
    with pytest.raises(ConfigurationError) as raised:
        dataplane.configure(secret=secret)  # type: ignore[arg-type]
    assert str(secret) not in str(raised.value)


def test_nothing_shows_a_secret() -> None:
    key = Key(SECRET)
    shown = repr(key) + repr(Config(secret=SECRET)) + repr(Keys(SECRET))
    assert SECRET.decode() not in shown
    assert key.derived(b"one purpose") != key.derived(b"another")
    assert SECRET not in key.name


def test_an_operation_ends_by_its_deadline_though_each_of_its_connections_is_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As happened with a damaged section: a new connection failed before the worker's thread looked at the deadline."""
    owner = RemoteOwner({"backend": "ucx", "ucx": {"TLS": "tcp,self"}}, shared=False)
    try:
        _, raw = owner("make", bytes(4096))
        buffer = RDMABuffer.deserialize(raw)
        buffer.read_into(bytearray(4096)).get()
        peer, _, _ = buffer.route()
        assert isinstance(peer, UcxPeer)
        connected = peer.connections.connected

        def and_cut(*args: Any) -> Any:
            connection, unpacked = connected(*args)
            unpacked[0].close()
            return connection, unpacked

        monkeypatch.setattr(peer.connections, "connected", and_cut)
        into = np.zeros(4096, np.uint8)
        action = dataplane.RDMAAction().read_remote(into, buffer)
        with pytest.raises(TransferTimeoutError, match="the deadline passed before"):
            action.submit(timeout=0.3).get(timeout=15)
    finally:
        monkeypatch.undo()
        owner.close()
