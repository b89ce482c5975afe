"""What a target says of an input beside the exceptions of the code."""


class Void(Exception):  # noqa: N818  (it is a verdict)
    """An input that says nothing: it is not of the form in which this target takes its parts."""


class Broken(Exception):  # noqa: N818  (it is a verdict)
    """An input led to something that must not be, though nothing was raised."""
