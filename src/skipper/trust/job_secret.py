"""The secret of the job that this process belongs to. A forked copy of it keeps that, as it keeps all memory."""

_secret: bytes | None = None


def enter_job(secret: bytes) -> None:
    """Note the secret of the job that this process belongs to from now on."""
    global _secret
    _secret = secret


def leave_job() -> None:
    """Note that this process belongs to no job any more. Idempotent."""
    global _secret
    _secret = None


def job_secret() -> bytes | None:
    """The secret of the job; None outside of one. The same object for as long as it is the same job."""
    return _secret
