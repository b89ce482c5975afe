"""`share_memory_` on plain modules; DTensor parameters and FSDP2 are in test_dtensors.py, in real processes."""

import torch

from skipper import dataplane
from skipper import torchstore as ts


def make_module() -> torch.nn.Module:
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8, bias=False))
    module[2].weight = module[0].weight
    module[0].register_parameter("empty", torch.nn.Parameter(torch.empty(0)))
    return module


def test_parameters_and_buffers_move_and_keep_values_and_identity() -> None:
    module = make_module()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    parameters = list(module.parameters())
    assert ts.share_memory_(module) is module
    assert all(old is new for old, new in zip(parameters, module.parameters(), strict=True))
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name])
        assert tensor.numel() == 0 or dataplane.is_shared(tensor)


def test_tied_parameters_stay_tied() -> None:
    module = ts.share_memory_(make_module())
    assert module[2].weight is module[0].weight
    assert module.state_dict()["2.weight"].data_ptr() == module.state_dict()["0.weight"].data_ptr()


def test_gradients_stay_where_they_are() -> None:
    module = make_module()
    module(torch.randn(4, 8)).sum().backward()
    gradient = module[0].weight.grad
    assert gradient is not None
    address, values = gradient.data_ptr(), gradient.clone()
    ts.share_memory_(module)
    assert module[0].weight.grad is not None
    assert module[0].weight.grad.data_ptr() == address
    assert torch.equal(module[0].weight.grad, values)


def test_an_optimizer_made_before_goes_on_training_the_shared_parameters() -> None:
    plain, shared = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    shared.load_state_dict(plain.state_dict())
    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.1) for module in (plain, shared)]
    ts.share_memory_(shared)
    for seed in range(3):
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        for module, optimizer in zip((plain, shared), optimizers, strict=True):
            module(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(plain.weight, shared.weight)
    assert dataplane.is_shared(shared.weight)


def test_sharing_twice_moves_nothing_the_second_time() -> None:
    module = ts.share_memory_(make_module())
    addresses = [tensor.data_ptr() for tensor in module.state_dict().values()]
    ts.share_memory_(module)
    assert [tensor.data_ptr() for tensor in module.state_dict().values()] == addresses


def test_strides_and_dtypes_are_kept() -> None:
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.randn(6, 4, dtype=torch.float64).t())
    values = module.weight.clone()
    ts.share_memory_(module)
    assert module.weight.stride() == (1, 4)
    assert torch.equal(module.weight, values)
