"""Everything that can go wrong when memory is moved, as one small tree.

    DataplaneError
    ├── ConfigurationError (ValueError)      configure() was asked for something that does not exist here
    ├── BackendUnavailableError              no usable backend reaches that memory from here
    ├── RegistrationError                    the memory cannot be registered or allocated
    ├── DescriptorError (ValueError)         bytes that are no handle of this version, or whose proof is not known here
    ├── BufferDroppedError                   the owner has dropped the buffer: its bytes mean nothing now
    └── TransferError                        the bytes did not arrive; `.status` holds the library's own code
        ├── OwnerDiedError                   the owning process is gone
        └── TransferTimeoutError (TimeoutError)  the deadline passed first

Arguments that no transfer could honour (wrong size, read-only destination, out of range, not contiguous) are plain
`ValueError` or `TypeError`, raised before a byte is sent. After any `DataplaneError` of a transfer that had begun, the
content of the destination is undefined.
"""


class DataplaneError(Exception):
    """Root of all errors of this package."""


class ConfigurationError(DataplaneError, ValueError):
    """`configure()` was given a value that does not exist, or too late to have an effect."""


class BackendUnavailableError(DataplaneError):
    """No backend that is usable here and allowed by the configuration reaches the memory."""


class RegistrationError(DataplaneError):
    """Memory could not be allocated, shared or registered."""


class DescriptorError(DataplaneError, ValueError):
    """The bytes are not a handle, were altered, or were signed with a secret that this process does not know."""


class BufferDroppedError(DataplaneError):
    """The owner dropped the buffer (or its last reference); bytes that were read are not valid."""


class TransferError(DataplaneError):
    """A transfer failed.

    Attributes:
        status: The status code of the library (for UCX a negative `ucs_status_t`), or None if there is none.
    """

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class OwnerDiedError(TransferError):
    """The process that owns the memory is gone; after a restart it has other handles."""


class TransferTimeoutError(TransferError, TimeoutError):
    """The deadline passed before the transfer was complete."""
