"""Examples on the hosts of a job."""

import argparse
import re

import pytest

from examples import job_option
from skipper.control import HostMesh
from skipper.control.cluster.jobs import LocalJob, SlurmJob
from tests.integration.example_process import run


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    job_option.add_arguments(parser)
    return parser.parse_args(arguments)


def test_without_options_an_example_runs_on_this_host() -> None:
    with job_option.hosts_of(parsed()) as hosts:
        assert isinstance(hosts, HostMesh)
        assert hosts.names == ()


def test_a_job_is_named_with_its_options() -> None:
    assert isinstance(parsed("--job", "local:2").job, LocalJob)
    job = parsed("--job", "slurm:3,partition=gpu,time_min=5,insecure=True").job
    assert isinstance(job, SlurmJob)
    assert (job.size, job.insecure) == (3, True)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("cray:2", "'cray' is none of local, slurm"),
        ("local", "does not say how many"),
        ("local:0", "at least one place, not 0"),
        ("local:2,speed=9", "unexpected keyword argument 'speed'"),
        ("slurm:2,time_min=0", "positive"),
    ],
)
def test_what_is_no_job_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(argparse.ArgumentError, match=complaint):
        parsed("--job", text)


def test_hello_runs_on_two_hosts_that_are_processes_of_this_machine() -> None:
    example = run("examples/hello_job.py", timeout=60.0)
    assert example.process.returncode == 0, example.stderr
    assert re.fullmatch(
        r"127\.0\.0\.2:\d+: rank 0 in process \d+\n"
        r"127\.0\.0\.3:\d+: rank 1 in process \d+\n"
        r"rank 0 reads from rank 1: \[1\.0, 1\.0, 1\.0, 1\.0\]\n",
        example.stdout,
    )
    assert example.stderr == ""
