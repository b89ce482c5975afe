"""The one error of this package."""


class GpuRunError(Exception):
    """Something that the run needs is missing; the message says what, and how to get it."""
