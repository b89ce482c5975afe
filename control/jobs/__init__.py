"""Jobs: hosts that an existing engine places, attached to the job of this script."""

from control.hosts.shell import shell
from control.jobs.engine import Engine, Place, PlaceState
from control.jobs.job import Job
from control.jobs.kubernetes import KubernetesJob
from control.jobs.local import LocalJob
from control.jobs.login import LoginJob
from control.jobs.manifests import Pods
from control.jobs.ray import RayJob
from control.jobs.slurm import SlurmJob
from control.jobs.spmd import SpmdJob

__all__ = [
    # the interface
    "Job",
    "Engine",
    "Place",
    "PlaceState",
    # what is done with their hosts
    "shell",
    # engines
    "KubernetesJob",
    "LocalJob",
    "LoginJob",
    "Pods",
    "RayJob",
    "SlurmJob",
    "SpmdJob",
]
