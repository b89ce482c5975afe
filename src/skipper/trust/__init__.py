"""How this process recognizes its own peers. It is below all other packages, and imports only the standard library.

It has the secrets that the process shares with others: `control` stores the job's here when the job begins, and
`dataplane` gets it from here when needed, so neither has to import the other. And it protects the sockets of libraries
that ask for no secret, UCX and gloo: `own_sockets` finds them, and `socket_filter` makes the kernel refuse others.
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
