"""Torch tensors: what has plain memory is moved, what has not is refused."""

import pytest
import torch

from skipper import dataplane
from skipper.dataplane import RDMAAction, RDMABuffer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.bool, torch.complex128])
@pytest.mark.parametrize("shape", [(), (7,), (3, 0, 2), (2, 3, 4)])
def test_empty_gives_tensors_like_torch(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = dataplane.empty(shape, dtype)
    assert tensor.shape == torch.Size(shape)
    assert tensor.dtype is dtype
    assert tensor.is_contiguous()
    if tensor.numel():
        assert dataplane.is_shared(tensor)


def test_empty_takes_the_default_dtype_and_a_bare_length() -> None:
    assert dataplane.empty(5).dtype is torch.get_default_dtype()
    assert dataplane.empty(5).shape == (5,)


def test_empty_refuses_what_it_cannot_make() -> None:
    with pytest.raises(ValueError, match="negative"):
        dataplane.empty((2, -1))
    with pytest.raises(ValueError, match="cpu or cuda"):
        dataplane.empty(3, device="meta")


def test_tensors_of_shared_memory_train_like_others() -> None:
    parameter = torch.nn.Parameter(dataplane.empty((4, 4)))
    with torch.no_grad():
        parameter.fill_(1)
    (parameter @ parameter).sum().backward()
    assert parameter.grad is not None
    RDMABuffer(parameter).read_into(torch.empty(4, 4)).get()


def test_a_view_of_a_tensor_is_registered_as_that_view() -> None:
    base = torch.arange(100)
    into = torch.empty(10, dtype=torch.int64)
    RDMABuffer(base[20:30]).read_into(into).get()
    assert into.tolist() == list(range(20, 30))


def test_strided_tensors_are_for_actions() -> None:
    base = torch.arange(48).reshape(6, 8)
    with pytest.raises(ValueError, match="contiguous"):
        RDMABuffer(base.t())
    into = torch.zeros(8, 6, dtype=torch.int64)
    RDMAAction().read_remote(into.t(), RDMABuffer(base)).submit().get()
    assert into.t().equal(base)


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """As FSDP frees a whole parameter: the tensor stays, its memory goes."""
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("tensor", "error", "match"),
    [
        (torch.empty(3, device="meta"), TypeError, "meta"),
        (torch.ones(3).to_sparse(), TypeError, "sparse"),
        (torch.ones(3, dtype=torch.complex64).conj(), ValueError, "resolve_conj"),
        (torch.empty(0), ValueError, "no bytes"),
        (torch.ones(1).expand(4), ValueError, "contiguous"),
        (freed(torch.ones(9)), ValueError, "was freed"),
        (freed(torch.ones(9)[3:]), ValueError, "was freed"),
    ],
    ids=["meta", "sparse", "conjugate", "empty", "expanded", "freed", "part of freed"],
)
def test_tensors_without_plain_memory_are_refused(tensor: torch.Tensor, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        RDMABuffer(tensor)


def test_a_wrapper_around_a_tensor_is_refused_by_name() -> None:
    class Wrapper(torch.Tensor):
        def to_local(self) -> torch.Tensor:
            return self.as_subclass(torch.Tensor)

    with pytest.raises(TypeError, match="Wrapper"):
        RDMABuffer(torch.ones(3).as_subclass(Wrapper))


def test_a_tensor_that_was_freed_is_no_destination_and_no_source() -> None:
    buffer = RDMABuffer(torch.zeros(9))
    for use in (
        lambda: buffer.read_into(freed(torch.ones(9))),
        lambda: buffer.write_from(freed(torch.ones(9))),
        lambda: RDMAAction().read_remote(freed(torch.ones(3, 3).t()), buffer),
        lambda: RDMAAction().write_remote(buffer, freed(torch.ones(9))),
    ):
        with pytest.raises(ValueError, match="was freed"):
            use()
