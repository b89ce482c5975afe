"""The secrets that this process shares with others. It is below all other rooms, and imports the standard library only.

`control` puts the job's secret here when it begins, and `dataplane` looks here when it first needs one: so neither has
to import the other.
"""

from skipper.trust.job_secret import enter_job, job_secret, leave_job
from skipper.trust.private_file import PrivateFileError, check_private, read_secret
from skipper.trust.user_secret import MIN_SECRET_NBYTES, SECRET_VARIABLE, folder, user_secret

__all__ = [
    # secrets
    "enter_job",
    "job_secret",
    "leave_job",
    "user_secret",
    "MIN_SECRET_NBYTES",
    "SECRET_VARIABLE",
    # files
    "check_private",
    "folder",
    "read_secret",
    "PrivateFileError",
]
