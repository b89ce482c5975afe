"""Output of processes on other hosts at the script: as that of its own, whatever happens to the host."""

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skipper import control
from skipper.control import Actor, ActorMesh, DeadlineError, HostMesh, attach_to_hosts, endpoint, this_host
from skipper.control.model.settings import adopt
from skipper.control.observe import LogOptions, collect_logs
from skipper.control.observe.log_forwarder import BATCH_NBYTES
from tests.control.conftest import PATIENCE_S, Failures, Output, Script, wait_until
from tests.hosts.conftest import LocalAgents
from tests.hosts.netns import Network

HEARTBEAT_S = 2.0
AT_ONCE = LogOptions(aggregate_s=0)


class Speaker(Actor):
    """Says what it is told."""

    @endpoint
    def say(self, text: str, times: int = 1) -> None:
        sys.stdout.write(f"{text}\n" * times)
        sys.stdout.flush()

    @endpoint
    def complain(self, text: str) -> None:
        os.write(2, text.encode())

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def grow(self) -> ActorMesh:
        """A speaker in a process that this one has started on its host."""
        return this_host().spawn_procs(name="grown").spawn("grown", Speaker)

    @endpoint
    def die(self, last: str) -> None:
        os.write(1, last.encode())
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch) -> Output:
    return Output(monkeypatch)


@pytest.fixture
def addresses(local_agent: LocalAgents) -> Iterator[list[str]]:
    """Of two hosts, of which none gets lost."""
    before = control.configure()
    control.configure(heartbeat_s=10.0)
    yield [local_agent("127.0.0.2"), local_agent("127.0.0.3")]
    adopt(before)


def how_many_said(text: str, shown: str) -> int:
    """Also where several lines were shown as one, as those are that come at the same time."""
    alike = re.findall(rf"^\[(?:.* x(\d+)|.*)\] {text}$", shown, re.MULTILINE)
    return sum(int(number or 1) for number in alike)


Speakers = tuple[HostMesh, ActorMesh[Speaker]]


@pytest.fixture
def speakers(addresses: list[str], secret_file: Path, output: Output) -> Speakers:
    """Two on each of two hosts."""
    hosts = attach_to_hosts(addresses, secret_file=secret_file)
    actors = hosts.spawn_procs(per_host={"gpus": 2}, name="speakers").spawn("speakers", Speaker)
    actors.initialized.get(PATIENCE_S)
    return hosts, actors


def test_lines_of_all_hosts_come_with_names_and_alike_ones_once(speakers: Speakers, output: Output) -> None:
    _, actors = speakers
    with collect_logs(options=LogOptions(aggregate_s=30.0)) as logs:
        actors.say.call("step 1").get(PATIENCE_S)
        output.wait_for("[speakers x4] step 1\n")
        logs.change(aggregate_s=0)
        actors.slice(hosts=1, gpus=0).say.call_one("alone").get(PATIENCE_S)
        output.wait_for("[speakers hosts=1 gpus=0] alone\n")
        actors.slice(hosts=0, gpus=1).complain.call_one("on the other stream\n").get(PATIENCE_S)
        output.wait_for("[speakers hosts=0 gpus=1] on the other stream\n", on_stderr=True)
        grown = actors.slice(hosts=0, gpus=0).grow.call_one().get(PATIENCE_S)
        grown.say.call_one("from below").get(PATIENCE_S)
        output.wait_for("[grown] from below\n")


def test_they_are_off_and_on_at_any_time_and_nothing_is_lost_at_the_close(
    speakers: Speakers, output: Output, secret_file: Path
) -> None:
    hosts, actors = speakers
    for turn in range(3):
        with collect_logs(options=AT_ONCE):
            actors.say.call(f"turn {turn}").get(PATIENCE_S)
        assert how_many_said(f"turn {turn}", output.out) == 4
        actors.say.call("where it went before").get(PATIENCE_S)
    with collect_logs(options=AT_ONCE):
        late = hosts.spawn_procs(name="late").spawn("late", Speaker)
        late.say.call("here, too").get(PATIENCE_S)
        late.slice(hosts=0).say.call_one("again").get(PATIENCE_S)
    assert how_many_said("here, too", output.out) == 2
    assert how_many_said("again", output.out) == 1
    wait_until(lambda: how_many_said("where it went before", output.out) == 12, "the script shows it by default")


def test_a_host_that_is_attached_later_is_heard(addresses: list[str], secret_file: Path, output: Output) -> None:
    first = attach_to_hosts(addresses[:1], secret_file=secret_file)
    with collect_logs(options=AT_ONCE):
        second = attach_to_hosts(addresses[1:], secret_file=secret_file)
        for name, hosts in (("first", first), ("second", second)):
            hosts.spawn_procs(name=name).spawn(name, Speaker).say.call("hello").get(PATIENCE_S)
            output.wait_for(f"[{name} hosts=0] hello\n")


def test_last_words_come_of_a_killed_process_and_of_hosts_that_are_let_go(speakers: Speakers, output: Output) -> None:
    hosts, actors = speakers
    with collect_logs(options=AT_ONCE):
        dying = hosts.slice(hosts=1).spawn_procs(name="dying")
        dying.spawn("dying", Speaker).say.call("still well").get(PATIENCE_S)
        dying.stop().get(PATIENCE_S)
        output.wait_for("[dying] still well\n")
        actors.say.broadcast("at last")
        hosts.stop().get(PATIENCE_S)
        wait_until(lambda: how_many_said("at last", output.out) == 4, "all of them are heard")


def test_a_process_that_is_killed_says_its_last_words(speakers: Speakers, output: Output, failures: Failures) -> None:
    hosts, _ = speakers
    with collect_logs(options=AT_ONCE):
        dying = hosts.slice(hosts=0).spawn_procs(name="dying").spawn("dying", Speaker)
        dying.die.broadcast("no line's end")
        output.wait_for("[dying] no line's end\n")
        failures.wait()


def test_files_are_whole_and_of_their_own_for_each_host(speakers: Speakers, output: Output, tmp_path: Path) -> None:
    _, actors = speakers
    pids = list(actors.pid.call().get(PATIENCE_S))
    times = 4 * BATCH_NBYTES // len("a line of a flood\n")
    with collect_logs(folder=tmp_path, options=LogOptions(max_lines_per_s=10, aggregate_s=0)) as logs:
        actors.say.call("a line of a flood", times).get(PATIENCE_S)
        output.wait_for(" dropped", on_stderr=True)
    assert logs.dropped + how_many_said("a line of a flood", output.out) == 4 * times
    for rank, (pid, host) in enumerate(zip(pids, ("127.0.0.2", "127.0.0.2", "127.0.0.3", "127.0.0.3"), strict=True)):
        (file,) = tmp_path.glob(f"speakers-hosts={rank // 2}-gpus={rank % 2}-{host}-*-{pid}.out")
        assert file.read_text() == "a line of a flood\n" * times


def test_a_flood_holds_up_who_writes_and_no_calls(speakers: Speakers, output: Output) -> None:
    """The script takes nothing for a while: the pipe fills up, and its host sends no more."""
    _, actors = speakers
    loud, quiet = actors.slice(hosts=0, gpus=0), actors.slice(hosts=0, gpus=1)
    with collect_logs(options=LogOptions(shown=False)) as logs:
        taken, logs._collector._take_from_afar = [], lambda *chunk: taken.append(chunk)  # type: ignore[method-assign]
        held, feed = [], logs._collector.feed
        logs._collector.feed = lambda *batch: held.append(batch)  # type: ignore[method-assign, assignment]
        flood = loud.say.call_one("x" * 999, 20_000)
        wait_until(lambda: bool(held), "a batch comes")
        for _ in range(20):
            quiet.pid.call_one().get(PATIENCE_S)
        with pytest.raises(DeadlineError):
            flood.get(2.0)
        assert len(held) == 1
        logs._collector.feed = feed  # type: ignore[method-assign]
        feed(*held.pop())
        flood.get(PATIENCE_S)
    assert sum(len(content) for _, _, (_, _, _, content) in taken if content) == 20_000_000


SCRIPT = """
from skipper import control
from skipper.control.observe import collect_logs
from tests.hosts.test_logs import Speaker

hosts = control.attach_to_hosts({addresses}, secret_file={secret_file!r})
speakers = hosts.spawn_procs(name="speakers").spawn("speakers", Speaker)
speakers.initialized.get(20)
collect_logs()
speakers.say.call("the last").get(20)
"""


def test_what_was_said_before_the_end_of_the_script_is_shown(
    addresses: list[str], secret_file: Path, script: Callable[[str], Script]
) -> None:
    code, out, err = script(SCRIPT.format(addresses=addresses, secret_file=str(secret_file))).finish()
    assert (code, err) == (0, "")
    assert how_many_said("the last", out) == 2


def test_what_a_lost_host_has_said_is_shown_and_the_others_go_on(
    net: Network, hosts: HostMesh, output: Output, failures: Failures
) -> None:
    hosts = hosts.reattach()
    lost = net.machines[1]
    with collect_logs(options=AT_ONCE) as logs:
        speakers = hosts.slice(hosts=slice(0, 2)).spawn_procs(name="speakers").spawn("speakers", Speaker)
        speakers.slice(hosts=1).complain.call_one("without an end").get(PATIENCE_S)
        output.wait_for("without an end", on_stderr=True)
        lost.pull()
        try:
            failures.wait()
            speakers.slice(hosts=0).say.call_one("goes on").get(PATIENCE_S)
            output.wait_for("[speakers hosts=0] goes on\n")
        finally:
            lost.plug()
        again = hosts.reattach().slice(hosts=1).spawn_procs(name="again").spawn("again", Speaker)
        again.say.call("back").get(PATIENCE_S)
        output.wait_for("[again] back\n")
        begin = time.monotonic()
    assert time.monotonic() - begin < control.configure().heartbeat_s
    assert logs.dropped == 0
