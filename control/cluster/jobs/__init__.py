"""Jobs: hosts that an existing engine places, attached to the job of this script."""

from skipper.control.cluster.hosts.shell import shell
from skipper.control.cluster.jobs.engine import Engine, Place, PlaceState
from skipper.control.cluster.jobs.job import Job
from skipper.control.cluster.jobs.kubernetes import KubernetesJob
from skipper.control.cluster.jobs.local import LocalJob
from skipper.control.cluster.jobs.login import LoginJob
from skipper.control.cluster.jobs.manifests import Pods
from skipper.control.cluster.jobs.ray import RayJob
from skipper.control.cluster.jobs.slurm import SlurmJob
from skipper.control.cluster.jobs.spmd import SpmdJob

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
