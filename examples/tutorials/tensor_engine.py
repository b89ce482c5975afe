"""PyTorch on two processes from one script: operations, a reduction, a training loop, a failure."""

import torch

from skipper.control import this_host
from skipper.tensor_engine import RemoteError, inspect, reduce_

procs = this_host().spawn_procs({"gpus": 2})  # two processes
with procs.activate():
    x = torch.ones(2, 3) * procs.rank_tensor("gpus")  # each has its own: zeros there, ones here
    w = torch.full((3, 1), 0.5, requires_grad=True)
    loss = (x @ w).square().sum()
loss.backward()
print(loss)
print(inspect(loss, gpus=0), inspect(loss, gpus=1))
assert w.grad is not None  # for type checkers
print(inspect(w.grad, gpus=1).tolist())

with procs.activate():
    mine = procs.rank_tensor("gpus") + torch.arange(4.0)  # 0 1 2 3 and 1 2 3 4
    total = mine.reduce("gpus")
print(inspect(total))

with procs.activate():
    torch.manual_seed(0)  # the same weights on both ranks
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(50):
        batch = torch.rand(16, 3) + procs.rank_tensor("gpus")  # each rank its own
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        reduce_([parameter.grad for parameter in model.parameters()], "gpus", "avg")
        optimizer.step()
        losses.append(loss.detach())
first, last = inspect(losses[0]), inspect(losses[-1])
print("the loss went down:", bool(last < first))
weights = [inspect(model.weight.detach(), gpus=rank) for rank in range(2)]
print("both ranks have the same weights:", torch.equal(weights[0], weights[1]))

with procs.activate():
    bad = torch.ones(2)[torch.tensor([5])]  # no such index
    worse, fine = bad + 1, torch.ones(1)
try:
    inspect(worse)
except RemoteError as error:
    print(error.operation)
    print("this script's line is named:", "no such index" in error.script_stack)
print(inspect(fine).tolist())
