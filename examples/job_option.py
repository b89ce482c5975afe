"""On which hosts an example runs: this one, those whose agents run already, or those that an engine gives to a job."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from skipper.control import HostMesh, attach_to_hosts, this_host
from skipper.control.cluster.jobs import Job, LocalJob, RayJob, SlurmJob
from skipper.control.model.errors import JobError

ENGINES: dict[str, Callable[..., Job]] = {"local": LocalJob, "slurm": SlurmJob, "ray": RayJob}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Let the command line of an example say where it runs."""
    where = parser.add_argument_group("hosts", "Without any of these everything runs on this machine.")
    choice = where.add_mutually_exclusive_group()
    choice.add_argument("--hosts", metavar="FILE", help="attach the agents whose addresses are in this file")
    choice.add_argument(
        "--job",
        type=_job_of,
        metavar="ENGINE:N[,KEY=VALUE...]",
        help=f"have {', '.join(ENGINES)} place N hosts, with options of the job: slurm:4,partition=gpu,time_min=30",
    )
    where.add_argument("--secret-file", metavar="FILE", help="with --hosts: the agents' secret")
    where.add_argument("--certs", metavar="DIR", help="with --hosts: the folder of this machine's certificates")
    where.add_argument("--insecure", action="store_true", help="with --hosts: go without TLS to other machines")
    where.add_argument("--data-plane", action="store_true", default=None, help="open it to other hosts, with TLS too")


@contextmanager
def hosts_of(options: argparse.Namespace) -> Iterator[HostMesh]:
    """The hosts that the command line asks for; what belongs to a job of an engine ends with the ``with`` statement.

    Args:
        options: as parsed with `add_arguments`.

    Raises:
        JobError: the engine refuses, or a host does not come up.
        HostError: a host cannot be attached.
        ValueError: the options do not fit together.
    """
    if options.job is not None:
        if options.data_plane is not None:
            options.job.data_plane = options.data_plane
        with options.job as job:
            yield job.hosts()
    elif options.hosts is not None:
        yield attach_to_hosts(
            options.hosts,
            secret_file=options.secret_file,
            certs=options.certs,
            insecure=options.insecure,
            data_plane=options.data_plane,
        )
    else:
        yield this_host()


def _job_of(text: str) -> Job:
    """``slurm:2,partition=gpu`` as a job that has not been started."""
    place, *settings = text.split(",")
    engine, _, count = place.partition(":")
    if engine not in ENGINES:
        raise argparse.ArgumentTypeError(f"{engine!r} is none of {', '.join(ENGINES)}")
    if not count.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} does not say how many hosts: {engine}:2")
    try:
        given = dict(setting.split("=", 1) for setting in settings)
        return ENGINES[engine](int(count), **{key: _value(value) for key, value in given.items()})
    except (ValueError, TypeError, JobError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _value(text: str) -> int | bool | str:
    if text in ("True", "False"):
        return text == "True"
    return int(text) if text.isdecimal() else text
