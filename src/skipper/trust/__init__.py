"""The ground that all floors stand on: which secrets this process shares with others. Standard library alone.

`control` puts the job's secret here where it begins, `dataplane` looks for it when it first needs one; neither has to
import the other for that.
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
