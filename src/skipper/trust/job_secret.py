"""The secret of the job that this process belongs to. A forked process has it too."""

_secret: bytes | None = None


def enter_job(secret: bytes) -> None:
    """Remember the secret of the job that this process now belongs to."""
    global _secret
    _secret = secret


def leave_job() -> None:
    """Forget the secret: this process no longer belongs to a job. Idempotent."""
    global _secret
    _secret = None


def job_secret() -> bytes | None:
    """The secret of the job, or None outside of one. It is the same object for as long as the job is the same."""
    return _secret
