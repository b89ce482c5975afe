"""Which of several ranks says something else of a tensor than the others: another dtype, or another shape.

The shares of one step describe the same tensors. Where they do not, the error names the rank that differs, whichever of
them happened to put first, as soon as a majority says who that is.
"""

from __future__ import annotations

from collections.abc import Mapping

from skipper.torchstore.algebra.layout import Ints
from skipper.torchstore.algebra.manifest import Manifest, TensorItem
from skipper.torchstore.errors import ShareDTypeMismatchError, ShareLayoutMismatchError, ShareMismatchError

_SHOWN = 8

_UNEVEN = (
    "; for uneven shards give DTensor.from_local the whole shape= and stride=, since it takes the local shape times "
    "the number of ranks for the whole"
)


def disagreement(key: str, shares: Mapping[int, Manifest], newest: int, *, more: bool) -> ShareMismatchError | None:
    """The error that names who differs in the first tensor that ranks disagree about.

    Args:
        key: Of the value.
        shares: What each rank has put of one step.
        newest: The rank whose share came last.
        more: Other ranks are still to put theirs: where it cannot be told yet who differs, they will tell.

    Returns:
        None where they agree about all tensors, or where it is for the next share to tell.
    """
    for name in dict.fromkeys(name for manifest in shares.values() for name in manifest.tensors):
        said: dict[tuple[str, Ints], list[int]] = {}
        for rank, manifest in sorted(shares.items()):
            item = manifest.tensors.get(name)
            if item is not None:
                said.setdefault((item.dtype, item.global_shape), []).append(rank)
        if len(said) < 2:
            continue
        groups = sorted(said.items(), key=lambda group: (-len(group[1]), newest in group[1]))
        (wanted, many), *others = groups
        undecided = len(many) == len(others[0][1])
        if undecided and more:
            return None
        odd, few = next((group for group in others if newest in group[1]), others[-1])
        sharded = any(_is_part(shares[rank].tensors[name]) for rank in (*many, *few))
        dtypes = odd[0] != wanted[0]
        kind = ShareDTypeMismatchError if dtypes else ShareLayoutMismatchError
        advice = _UNEVEN if sharded and not dtypes else ""
        return kind(
            f"{key}/{name}" if name else key,
            f"{_ranks(few)} put {_described(odd)} and not {_described(wanted)} as {_ranks(many)} did{advice}",
            tuple(few),
            tuple(many),
        )
    return None


def _is_part(item: TensorItem) -> bool:
    return any(piece.box.shape != item.global_shape for piece in item.pieces)


def _described(said: tuple[str, Ints]) -> str:
    return f"{said[0].removeprefix('torch.')}{list(said[1])}"


def _ranks(ranks: list[int]) -> str:
    shown = [str(rank) for rank in ranks[:_SHOWN]]
    if len(ranks) > _SHOWN:
        shown.append(f"{len(ranks) - _SHOWN} more")
    return f"rank {shown[0]}" if len(shown) == 1 else f"ranks {', '.join(shown[:-1])} and {shown[-1]}"
