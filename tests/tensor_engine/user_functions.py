"""Functions that tests have workers call as the user's own."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist

from skipper.tensor_engine import OpaqueRef, remote

calls = 0


def count_calls(x: torch.Tensor) -> torch.Tensor:
    """Add to ``x`` how often it has been called in this process; the module keeps count."""
    global calls
    calls += 1
    return x + calls


def reset() -> None:
    """Start to count anew."""
    global calls
    calls = 0


def calls_so_far() -> int:
    """How often `count_calls` has been called."""
    return calls


@remote(propagate="cached")
def decorated(x: torch.Tensor) -> torch.Tensor:
    """Counts, too."""
    return count_calls(x)


def twice(x: torch.Tensor) -> torch.Tensor:
    """Call another remote function, which is a plain one here."""
    result: torch.Tensor = decorated(decorated(x))
    return result


def nested(batch: dict[str, Any], *rest: Any, scale: float) -> dict[str, Any]:
    """Tensors and others, in and out."""
    first, (second, label) = batch["first"], batch["more"]
    return {"sum": [first + second * scale, (rest[0] - 1,)], "label": label.upper(), "count": len(rest)}


def view_and_change(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A view of an input, the input itself, and another one, which is changed."""
    y.add_(1)
    return x[1:], x, y


def positive(x: torch.Tensor) -> torch.Tensor:
    """As many elements as are positive."""
    return x[x > 0]


def same(x: torch.Tensor) -> torch.Tensor:
    """The input itself."""
    return x


def fail_after_change(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Change one input and fail."""
    x.zero_()
    raise ValueError("told to fail")


def sum_over(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """A sum over the ranks by torch's own function."""
    result = x.clone()
    dist.all_reduce(result, group=group)
    return result


def members(group: dist.ProcessGroup) -> tuple[int, int]:
    """This worker's rank, and how many there are."""
    return group.rank(), group.size()


def broadcast(x: torch.Tensor, groups: dict[str, dist.ProcessGroup]) -> torch.Tensor:
    """The last one's value, for all."""
    result = x.clone()
    dist.broadcast(result, group_src=groups["all"].size() - 1, group=groups["all"])
    return result


def make_list(x: torch.Tensor) -> OpaqueRef:
    """A list that stays."""
    return OpaqueRef([x])


def append(kept: OpaqueRef, x: torch.Tensor) -> None:
    """Add to it."""
    kept.value.append(x)


def total(kept: OpaqueRef) -> torch.Tensor:
    """The sum of what is in it."""
    return torch.stack(kept.value).sum(0)


def length(kept: OpaqueRef) -> int:
    """How much is in it."""
    return len(kept.value)


class Account:
    """Has a balance."""

    def __init__(self, balance: torch.Tensor) -> None:
        self.balance = balance.clone()
        self.deposits = 0

    def deposit(self, x: torch.Tensor, times: int = 1) -> torch.Tensor:
        """Add to it."""
        self.deposits += 1
        self.balance += x * times
        return self.balance.clone()

    def count(self) -> int:
        """How often something has been added."""
        return self.deposits

    def above(self, limit: float) -> torch.Tensor:
        """The part above a limit."""
        return self.balance[self.balance > limit]


class Scaled(torch.nn.Module):
    """A layer that is the same on each worker, with a parameter that is frozen and one that is not used."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(inputs, outputs)
        with torch.no_grad():
            self.linear.weight.copy_(torch.arange(6.0).reshape(outputs, inputs) / 10)
            self.linear.bias.fill_(0.5)
        self.frozen = torch.nn.Parameter(torch.tensor([1.0, 2.0]), requires_grad=False)
        self.unused = torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        """The layer, scaled twice."""
        result: torch.Tensor = self.linear(x) * self.frozen * scale
        return result


def cube(x: torch.Tensor) -> tuple[OpaqueRef, torch.Tensor]:
    """The third power, and what its gradient needs."""
    return OpaqueRef(x), x**3


def cube_back(kept: OpaqueRef, grad: torch.Tensor) -> torch.Tensor:
    """Its gradient."""
    result: torch.Tensor = 3 * kept.value**2 * grad
    return result


_events: dict[str, threading.Event] = {}
_events_lock = threading.Lock()


def event(name: str) -> threading.Event:
    """An event of this process."""
    with _events_lock:
        return _events.setdefault(name, threading.Event())


def wait_for(name: str, x: torch.Tensor) -> torch.Tensor:
    """The input, once an event has been set."""
    if not event(name).wait(30):
        raise TimeoutError(name)
    return x + 0


def hold_first(name: str, rank: torch.Tensor) -> torch.Tensor:
    """The input; on the first rank once an event has been set."""
    return wait_for(name, rank) if rank == 0 else rank + 0


def set_event(name: str, x: torch.Tensor) -> torch.Tensor:
    """The input, after setting an event."""
    event(name).set()
    return x + 0


_gates: dict[str, threading.Semaphore] = {}


def gate(name: str) -> threading.Semaphore:
    """A gate of this process, which is closed at first."""
    with _events_lock:
        return _gates.setdefault(name, threading.Semaphore(0))


def pass_gate(name: str, x: torch.Tensor) -> torch.Tensor:
    """The input, once somebody has opened the gate, which closes behind it."""
    if not gate(name).acquire(timeout=30):
        raise TimeoutError(name)
    return x + 0


def open_gate(name: str, x: torch.Tensor) -> torch.Tensor:
    """The input, after letting one pass."""
    gate(name).release()
    return x + 0


def fail_if_large(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Add one input to the other, and fail after that if it is large."""
    y.add_(x)
    if x.max() > 10:
        raise ValueError("too large")
    return y


def register_backends() -> None:
    """Make backends of `torch.compile` known that get something wrong."""
    if "gives_up" in torch._dynamo.list_backends(()):
        return

    def gives_up(module: Any, inputs: Any) -> Any:
        if len(module.graph.find_nodes(op="placeholder")) > 1:
            raise NotImplementedError("more than one input")
        return module.forward

    def lays_out(module: Any, inputs: Any) -> Any:
        """Results in other strides, at another place of their memory."""

        def moved(each: torch.Tensor) -> torch.Tensor:
            room = torch.empty((*each.shape[::-1], 2), dtype=each.dtype)
            return room[..., 1].permute(*range(each.dim() - 1, -1, -1)).copy_(each)

        return lambda *given: tuple(moved(each) for each in module(*given))

    torch._dynamo.register_backend(gives_up)  # type: ignore[no-untyped-call]
    torch._dynamo.register_backend(lays_out)  # type: ignore[no-untyped-call]


def use_compiler(name: str | None) -> None:
    """Have inductor use another C++ compiler; None for its own choice."""
    import torch._inductor.config

    torch._inductor.config.cpp.cxx = (None, name or "g++")  # type: ignore[assignment]


@torch.library.custom_op("skipper_tests::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    """An operation that workers know once they have imported this module."""
    return x / 2


halved.register_fake(torch.empty_like)
