"""A script that uses a real Ray on this machine: ``python -m tests.torchstore.adapters.ray_script FOLDER``.

For each scenario it prints one line of JSON: its name, what it has found out, and the error that ended it.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
from ray.experimental import set_target_for_ref
from ray.experimental.rdt.util import get_tensor_transport_manager

from skipper import dataplane
from skipper.torchstore.adapters import register_ray
from tests.ray_scripts import start_ray

register_ray()  # before the class: its decorators ask for the transport by name
register_ray()  # again changes nothing

WITHIN_S = 60.0
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool, torch.complex64)


def every_kind() -> dict[str, Any]:
    """Tensors of all sorts, among other things."""
    grid = torch.arange(600.0).reshape(20, 30)
    return {
        "dtypes": [torch.arange(30).reshape(5, 6).to(dtype) for dtype in DTYPES],
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "strided": [grid.T, grid[2:9, 3::4], grid[0].expand(7, 30), torch.view_as_complex(grid[:, :2].clone()).conj()],
        "shared": dataplane.empty((4, 5)).copy_(torch.arange(20.0).reshape(4, 5)),
        "learned": torch.nn.Parameter(torch.ones(3)),
        "number": 7,
    }


def differences(found: dict[str, Any]) -> list[str]:
    """The names in which what was read differs from `every_kind`."""
    wrong = []
    for name, wanted in every_kind().items():
        pairs = zip(wanted, found[name], strict=True) if isinstance(wanted, list) else [(wanted, found[name])]
        for one, other in pairs:
            if isinstance(one, torch.Tensor):
                same = one.shape == other.shape and one.dtype == other.dtype
                same = same and one.resolve_conj().contiguous().flatten().view(torch.uint8).equal(
                    other.resolve_conj().contiguous().flatten().view(torch.uint8)
                )
            else:
                same = one == other
            if not same:
                wrong.append(name)
    return wrong


@ray.remote(enable_tensor_transport=True, num_cpus=0, max_concurrency=1)
class Worker:
    """Makes tensors, and looks at those of others."""

    @ray.method(tensor_transport="skipper")
    def make_every_kind(self) -> Any:
        return every_kind()

    @ray.method(tensor_transport="skipper")
    def make(self, numel: int) -> torch.Tensor:
        self.made = torch.arange(float(numel))
        return self.made

    def change(self, by: float) -> None:
        self.made += by

    def stand_still(self, until: str) -> None:
        """Be busy, with the GIL given away, until there is a file."""
        while not Path(until).exists():
            time.sleep(0.01)

    def differences(self, found: dict[str, Any]) -> list[str]:
        return differences(found)

    def total(self, tensor: torch.Tensor) -> float:
        return float(tensor.sum())

    def held(self) -> int:
        """Of how many objects tensors are registered here."""
        return held()

    def pid(self) -> int:
        return os.getpid()


def held() -> int:
    return len(get_tensor_transport_manager("SKIPPER")._buffers)


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + WITHIN_S
    while not is_so():
        if time.monotonic() > end:
            raise TimeoutError("it has not come to that")
        time.sleep(0.05)


def get(ref: Any) -> Any:
    return ray.get(ref, timeout=WITHIN_S)


def values(folder: Path, maker: Any, reader: Any) -> Any:
    """Between actors, to the script, and from it."""
    made = maker.make_every_kind.remote()
    return {
        "actor to actor": get(reader.differences.remote(made)),
        "actor to script": differences(get(made)),
        "script to actor": get(reader.differences.remote(ray.put(every_kind(), _tensor_transport="skipper"))),
    }


def a_busy_maker(folder: Path, maker: Any, reader: Any) -> Any:
    """Others read while the maker's only thread for methods is held."""
    made = maker.make.remote(1_000_000)
    ray.wait([made], timeout=WITHIN_S, fetch_local=False)
    until = folder / "enough"
    busy = maker.stand_still.remote(str(until))
    total = get(reader.total.remote(made))
    is_busy = not ray.wait([busy], timeout=0)[0]
    until.touch()
    get(busy)
    return {"total": total, "is_busy": is_busy}


def changes(folder: Path, maker: Any, reader: Any) -> Any:
    """What the maker writes later is what is read later."""
    made = maker.make.remote(1000)
    before = get(reader.total.remote(made))
    get(maker.change.remote(1.0))
    return [before, get(reader.total.remote(made))]


def own_memory(folder: Path, maker: Any, reader: Any) -> Any:
    """Into a tensor of the reader's, if it fits."""
    made, target = maker.make.remote(1000), torch.zeros(1000)
    set_target_for_ref(made, [target])
    got = get(made)
    set_target_for_ref(made, [short := torch.zeros(999)])
    try:
        get(made)
    except ValueError as error:
        assert not short.any()
        return {"is_there": got is target, "total": float(target.sum()), "misfit": str(error)}
    raise AssertionError("Ray has taken a target of another shape")


def let_go(folder: Path, maker: Any, reader: Any) -> Any:
    """Registrations end with Ray's last reference, in actors and in the script."""
    made, put = [maker.make.remote(10) for _ in range(3)], ray.put(torch.ones(5), _tensor_transport="skipper")
    get(made)
    before = get(maker.held.remote()), held()
    del made, put
    wait_until(lambda: get(maker.held.remote()) == 0 and held() == 0)
    return before


def a_killed_maker(folder: Path, maker: Any, reader: Any) -> Any:
    """Readers are told, and live on."""
    victim = Worker.remote()
    made = victim.make.remote(1000)
    get(reader.total.remote(made))
    os.kill(get(victim.pid.remote()), signal.SIGKILL)
    told = 0
    for ask in (lambda: get(reader.total.remote(made)), lambda: get(made)):
        try:
            ask()
        except dataplane.OwnerDiedError:
            told += 1
    return {"told": told, "next": get(reader.total.remote(maker.make.remote(3)))}


def a_stranger(folder: Path, maker: Any, reader: Any) -> Any:
    """An actor that knows another secret reads nothing, and an actor that knows it goes on."""
    secret = folder / "secret"
    secret.write_bytes(os.urandom(32))
    secret.chmod(0o600)
    environment = {"env_vars": {"SKIPPER_SECRET_FILE": str(secret)}}
    stranger = Worker.options(runtime_env=environment).remote()
    made = maker.make.remote(1000)
    try:
        get(stranger.total.remote(made))
    except dataplane.DescriptorError:
        return get(reader.total.remote(made))
    raise AssertionError("a stranger has read it")


SCENARIOS = (values, a_busy_maker, changes, own_memory, let_go, a_killed_maker, a_stranger)


def main() -> None:
    """See above."""
    folder = Path(sys.argv[1])
    start_ray(sys.argv[1], cpus=2)
    maker, reader = Worker.remote(), Worker.remote()
    try:
        for scenario in SCENARIOS:
            line: dict[str, Any] = {"name": scenario.__name__}
            try:
                line["found"] = scenario(folder, maker, reader)
            except Exception as error:  # noqa: BLE001  (the test says what was wrong)
                line["error"] = f"{type(error).__name__}: {error}"
            print(json.dumps(line), flush=True)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
