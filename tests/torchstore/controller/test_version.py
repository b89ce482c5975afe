"""The rank that differs is named, whichever has put first."""

import re
from itertools import permutations

import pytest

from skipper.torchstore.algebra.layout import Layout, Shard
from skipper.torchstore.controller import version as version_module
from skipper.torchstore.controller.agreement import Agreement
from skipper.torchstore.controller.history import History
from skipper.torchstore.controller.version import Contribution, disagreement
from skipper.torchstore.errors import (
    DTypeMismatchError,
    LayoutMismatchError,
    PartiallyPublishedError,
    ShareMismatchError,
)
from skipper.torchstore.protocol.messages import Selector
from tests.torchstore.controller.test_history import shard

ROWS = Layout((8,), (4,), (Shard(0),))
OTHER_ROWS = Layout((12,), (4,), (Shard(0),))


def shares(odd: int, **options: object) -> list[Contribution]:
    return [shard(rank, layout=ROWS, **(options if rank == odd else {})) for rank in range(4)]  # type: ignore[arg-type]


def refused(history: History, puts: list[Contribution]) -> ShareMismatchError:
    """The error of the first put that is refused."""
    for put in puts:
        try:
            history.contribute(put, None)
        except ShareMismatchError as error:
            return error
    raise AssertionError("all of them were taken")


@pytest.mark.parametrize("order", list(permutations(range(4))), ids=str)
def test_the_rank_with_another_dtype_is_named_whichever_puts_first(order: tuple[int, ...]) -> None:
    puts = shares(2, dtype="torch.bfloat16")
    history = History("w")
    error = refused(history, [puts[rank] for rank in order])
    assert isinstance(error, DTypeMismatchError)
    assert error.ranks == (2,)
    assert re.search(r"'w': rank 2 put bfloat16\[8\] and not float32\[8\] as rank", str(error))
    assert not history.ready
    assert not history.staging


def test_the_rank_with_another_shape_is_told_what_from_local_takes_for_the_whole() -> None:
    history = History("w")
    error = refused(history, [shard(0, layout=OTHER_ROWS), *shares(0)[1:]])
    assert isinstance(error, LayoutMismatchError)
    assert re.search(r"rank 0 put .*\[12\] and not .*\[8\] as ranks 1 and 2 did.*from_local", str(error))
    assert (error.ranks, error.others) == ((0,), (1, 2))


def test_of_two_ranks_the_later_one_is_named_first() -> None:
    two = Layout((8,), (2,), (Shard(0),))
    history = History("w")
    history.contribute(shard(0, layout=two), None)
    with pytest.raises(ShareMismatchError, match=r"rank 1 put int32.* as rank 0 did"):
        history.contribute(shard(1, layout=two, dtype="torch.int32"), None)


def test_a_version_is_not_whole_while_it_is_disputed() -> None:
    puts = shares(0, dtype="torch.bfloat16")
    history = History("w")
    for share in puts[:2]:
        history.contribute(share, None)
    with pytest.raises(PartiallyPublishedError):
        history.select(Selector())
    history.contribute(shard(0, layout=ROWS, dtype="torch.float32"), None)  # the same put once more, mended
    for share in puts[2:]:
        version = history.contribute(share, None)
    assert history.select(Selector()) is version


def test_shares_that_agree_are_no_matter() -> None:
    manifests = {rank: share.manifest for rank, share in enumerate(shares(0)) if share.manifest is not None}
    assert disagreement("w", manifests, 3, more=False) is None


def test_shares_that_agree_are_not_compared_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(manifests: object) -> str:
        raise AssertionError("two shares were compared")

    monkeypatch.setattr(version_module, "_disagree", compare)
    history = History("w")
    for share in shares(0):
        version = history.contribute(share, None)
    assert history.select(Selector()) is version


def test_a_share_is_held_against_all_that_others_have_named() -> None:
    first, second, third = (
        manifest for share in shares(2, dtype="torch.int32")[:3] if (manifest := share.manifest) is not None
    )
    agreement = Agreement()
    assert agreement.take(first)
    assert agreement.take(second)
    assert not agreement.take(third)
    assert agreement.take(first)
    assert agreement.is_about([first, second, third])
    assert not agreement.is_about([first, third])  # one of them was put again, and says something else
