"""What tells this process's own from strangers. It is below all other rooms, and imports the standard library only.

The secrets that it shares with others: `control` puts the job's here when it begins, and `dataplane` looks here when it
first needs one, so neither has to import the other. And the sockets of libraries that ask for no secret, UCX and gloo:
`own_sockets` finds them among the descriptors, `socket_filter` has the kernel keep others away.
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
