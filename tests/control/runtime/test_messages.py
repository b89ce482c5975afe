import pytest

from skipper.control.runtime.messages import Loss
from skipper.control.wire.process_ref import ProcessRef


@pytest.mark.parametrize(
    ("address", "name", "words"),
    [
        ("unix-abstract:x", "procs{'gpus': 0}", "process procs{'gpus': 0} is gone: why"),
        ("10.0.0.7:0", "procs{'gpus': 0}", "process procs{'gpus': 0} on host 10.0.0.7 is gone: why"),
        ("[fd00::7]:26000", "procs", "process procs on host fd00::7 is gone: why"),
        ("10.0.0.7:26000", "host 10.0.0.7:26000", "process host 10.0.0.7:26000 is gone: why"),
    ],
)
def test_the_loss_of_a_process_names_its_host_where_there_are_several(address: str, name: str, words: str) -> None:
    loss = Loss.of(ProcessRef("job-1", address, name), "why", in_good_order=False)
    assert loss.reason == words
