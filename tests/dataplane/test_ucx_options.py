"""What `configure(ucx=...)` takes, and what happens to what it does not."""

from tests.dataplane.scripts import run

START = "import os, sys, dataplane, numpy as np\nbefore = dict(os.environ)\n"
REFUSED = (
    START
    + """
try: dataplane.configure(ucx={option!r})
except dataplane.ConfigurationError as error: print(error)
else: print('taken')
"""
)


def test_an_option_that_ucx_does_not_know_is_named_and_nothing_is_started() -> None:
    out = run(
        REFUSED.format(option={"NO_SUCH_OPTION": 1})
        + "import threading\nassert threading.active_count() == 1\n"
        + "assert dataplane.process.current().config.ucx == {}\n"
    )
    assert "NO_SUCH_OPTION" in out


def test_a_value_that_ucx_does_not_take_is_named() -> None:
    assert "RNDV_THRESH that can be 'soon'" in run(REFUSED.format(option={"RNDV_THRESH": "soon"}))


def test_options_are_taken_with_and_without_prefix_and_leave_the_environment_alone() -> None:
    out = run(
        START
        + "dataplane.configure(ucx={'UCX_TLS': 'tcp,self', 'tcp_put_enable': 'n', 'LOG_LEVEL': 'fatal'})\n"
        + "dataplane.RDMABuffer(np.zeros(9)).serialize()\n"
        + "assert dict(os.environ) == before\n"
        + "print(sorted(dataplane.process.current().config.ucx))\n"
    )
    assert out == "['LOG_LEVEL', 'TCP_PUT_ENABLE', 'TLS']\n"


def test_options_come_too_late_once_ucx_runs() -> None:
    out = run(
        START
        + "dataplane.RDMABuffer(np.zeros(9)).serialize()\n"
        + "try: dataplane.configure(ucx={'TLS': 'tcp,self'})\n"
        + "except dataplane.ConfigurationError as error: print(error)\n"
    )
    assert "before its first use" in out


def test_without_descriptors_ucx_is_refused_and_works_once_there_are_some() -> None:
    out = run(
        START
        + "import resource\n"
        + "dataplane.RDMABuffer(np.zeros(9))\n"
        + "_, most = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        + "resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')) + 10, most))\n"
        + "buffer = dataplane.RDMABuffer(np.zeros(9))\n"
        + "try: buffer.serialize()\n"
        + "except dataplane.BackendUnavailableError as error: print(error)\n"
        + "resource.setrlimit(resource.RLIMIT_NOFILE, (1000, most))\n"
        + "buffer.serialize()\n"
    )
    assert "ulimit -n" in out
