"""The garbage collector rests until the last block that wants it to has ended, whatever thread that is in."""

import gc

from skipper.dataplane.uncollected import uncollected


def test_a_block_that_ends_first_leaves_the_collector_off_for_the_others() -> None:
    first, second = uncollected(), uncollected()
    with first:
        second.__enter__()
        assert not gc.isenabled()
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
