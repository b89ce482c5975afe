"""What views of one storage have in common, against the same question asked element by element."""

import random

import pytest
import torch

from skipper.torchstore.algebra.strided import NotStridedError, Pair, Strided, meet, merged

SHAPE = (6, 8, 4)


def addresses(strided: Strided) -> list[int]:
    """All of them, in the order of the indices."""
    return torch.arange(200_000).as_strided(strided.shape, strided.strides, strided.offset).flatten().tolist()


def some_view(chance: random.Random, *, repeated: bool) -> Strided:
    """A view as loaders make them: reshaped, cut, transposed, and repeated where that is asked for."""
    tensor = torch.empty(SHAPE, device="meta")
    for _ in range(chance.randint(1, 4)):
        dim = chance.randrange(tensor.ndim)
        match chance.randrange(4):
            case 0 if tensor.shape[dim] > 1:
                size = chance.randint(1, tensor.shape[dim])
                tensor = tensor.narrow(dim, chance.randint(0, tensor.shape[dim] - size), size)
            case 1:
                tensor = tensor.transpose(dim, chance.randrange(tensor.ndim))
            case 2 if tensor.shape[dim] % 2 == 0:
                tensor = tensor.unflatten(dim, (2, -1))
            case 3 if tensor.is_contiguous() and tensor.ndim > 1:
                tensor = tensor.flatten(0, 1)
    if repeated:
        tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
    return Strided(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())


@pytest.mark.parametrize("seed", range(100))
def test_two_views_have_in_common_what_their_elements_have(seed: int) -> None:
    chance = random.Random(seed)
    one, other = some_view(chance, repeated=seed % 3 == 0), some_view(chance, repeated=False)
    mine, theirs = Strided.contiguous(one.shape), Strided.contiguous(other.shape)
    try:
        common = meet(Pair(one, mine), Pair(other, theirs))
    except NotStridedError:
        return  # refused, which tells nothing wrong
    place = dict(zip(addresses(other), addresses(theirs), strict=True))
    expected = {
        (index, place[address])
        for address, index in zip(addresses(one), addresses(mine), strict=True)
        if address in place
    }
    pairs = [pair for each in common.found for pair in zip(addresses(each.at), addresses(each.of), strict=True)]
    assert sorted(pairs) == sorted(expected)
    for each in common.found:
        short = merged(each)
        again = zip(addresses(short.at), addresses(short.of), strict=True)
        assert sorted(again) == sorted(zip(addresses(each.at), addresses(each.of), strict=True))
    left = [pair for each in common.rest for pair in zip(addresses(each.at), addresses(each.of), strict=True)]
    everything = zip(addresses(one), addresses(mine), strict=True)
    assert sorted(left) == sorted(pair for pair in everything if pair[0] not in place)


def test_most_of_what_loaders_do_can_be_said() -> None:
    refused = 0
    for seed in range(300):
        chance = random.Random(seed)
        one, other = some_view(chance, repeated=False), some_view(chance, repeated=False)
        try:
            meet(Pair(one, one), Pair(other, other))
        except NotStridedError:
            refused += 1
    assert refused < 30


def test_a_set_that_wraps_around_the_rows_of_the_other_is_refused() -> None:
    rows, wrapping = Strided(0, (4, 8), (8, 1)), Strided(5, (2, 6), (8, 1))
    with pytest.raises(NotStridedError, match="carries"):
        meet(Pair(rows, rows), Pair(wrapping, wrapping))
    with pytest.raises(NotStridedError, match="divide"):
        meet(Pair(rows, rows), Pair(Strided(0, (4, 3), (3, 1)), Strided(0, (4, 3), (3, 1))))


def test_dims_of_a_tensor_stay_apart() -> None:
    whole = Strided.contiguous((4, 8))
    assert merged(Pair(whole, whole)).at.shape == (32,)
    assert merged(Pair(whole, whole), (whole.strides, whole.strides)).at.shape == (4, 8)


def test_an_empty_set_stays_empty() -> None:
    """As `weight[rows:]` is, where nothing is left to be padded."""
    nothing = Strided(64, (0, 8), (8, 1))
    for pair in (Pair(nothing, nothing), merged(Pair(nothing, nothing))):
        assert pair.at.numel == pair.of.numel == 0
        whole = Pair(Strided.contiguous((16, 8)), Strided.contiguous((16, 8)))
        common = meet(whole, pair)
        assert not common.found
        assert common.rest == (whole,)
