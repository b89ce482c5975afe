"""Numbers that nobody means, and what may be said of them: an error of ours or of a kind that names the argument."""

import math
from collections.abc import Callable
from typing import Any

HUGE = (2**31, 2**32, 2**63, 2**64, 2**2000, 1e300, math.inf)
NEGATIVE = (-1, -(2**63), -(2**64), -math.inf)
NOT_NUMBERS = (math.nan, "9" * 5000, [], {})
STRANGE: tuple[Any, ...] = (*HUGE, *NEGATIVE, *NOT_NUMBERS)

Call = Callable[[Any], object]


def refused_well(call: Call, value: Any, *errors: type[BaseException]) -> None:
    """Make a call; where it raises, it has to be one of the errors, a `ValueError`, a `TypeError` or a `TimeoutError`.

    What would get past here is an `OverflowError`, a `struct.error`, an `AssertionError`, a `MemoryError`.
    """
    try:
        call(value)
    except (ValueError, TypeError, TimeoutError, *errors) as error:
        assert str(error)  # noqa: PT017  (any of them will do)
        assert not isinstance(error, UnicodeError)  # noqa: PT017
