"""`Replica`: model, optimizer and gradient of one process, in memory that others read one-sidedly."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from examples.fault_tolerance.task import DTYPE, Task
from skipper.dataplane import RDMABuffer, empty


class Replica:
    """A whole copy of what is trained.

    An ordinary module and an ordinary optimizer, whose tensors are views of two pieces of memory:

    * ``state``: weights, and both moments of Adam, a row each;
    * ``gradient``: of the loss, and behind it the loss itself; both summed over the samples of this process.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.model, self._teacher = task.student(), task.teacher()
        parameters = list(self.model.parameters())
        count = sum(parameter.numel() for parameter in parameters)
        self.state: Tensor = empty((3, count), DTYPE).zero_()
        self.gradient: Tensor = empty((count + 1,), DTYPE).zero_()
        self.optimizer = torch.optim.Adam(parameters, lr=task.learning_rate)
        rows = zip(*(_views(row, parameters) for row in (*self.state, self.gradient)), strict=True)
        for parameter, (weights, first, second, gradient) in zip(parameters, rows, strict=True):
            parameter.data = weights.copy_(parameter.data)
            parameter.grad = gradient
            self.optimizer.state[parameter] = {"step": torch.tensor(0.0), "exp_avg": first, "exp_avg_sq": second}
        self.state_handle, self.gradient_handle = RDMABuffer(self.state), RDMABuffer(self.gradient)

    def differentiate(self, step: int, begin: int, end: int) -> None:
        """Fill ``gradient`` for some of the samples of a step."""
        self.gradient.zero_()
        if begin == end:
            return
        samples = self.task.inputs_of(step)[begin:end]
        loss = (self.model(samples) - self._teacher(samples)).square().sum()
        loss.backward()
        self.gradient[-1] = loss.detach()

    def apply(self, total: Tensor) -> float:
        """Let the optimizer make its step with a gradient summed over the whole batch; the loss before it."""
        torch.div(total, self.task.batch, out=self.gradient)
        self.optimizer.step()
        return float(self.gradient[-1])

    def resume(self, step: int) -> None:
        """Go on as one that has made so many steps, after ``state`` was filled from outside."""
        for kept in self.optimizer.state.values():
            kept["step"].fill_(step)


def _views(row: Tensor, parameters: list[nn.Parameter]) -> Iterator[Tensor]:
    """Parts of a row, in the shapes of the parameters."""
    begin = 0
    for parameter in parameters:
        yield row[begin : begin + parameter.numel()].view_as(parameter)
        begin += parameter.numel()
