"""One update as a worker takes it, in pieces: when its model is given what."""

from collections.abc import AsyncIterator, Iterator
from importlib import import_module
from typing import Any

import pytest
import torch

from skipper import torchstore as ts
from skipper.torchstore.support.blocking import run
from tests.torchstore import stand_ins

stand_ins.install()
reading: Any = import_module("skipper.torchstore.adapters.vllm.reading")
load_form: Any = import_module("skipper.torchstore.adapters.vllm.load_form")
messages: Any = import_module("skipper.torchstore.adapters.vllm.messages")
CPU = torch.device("cpu")
PIECES = (["0.weight", "0.bias", "1.weight"], ["1.bias", "2.weight"], ["2.bias"])
"""Two layers are cut between pieces."""


class Layers(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(torch.nn.Linear(8, 8) for _ in range(3)))
        self.calls: list[str] = []
        with torch.no_grad():
            for weight in self.parameters():
                weight.zero_()

    def load_weights(self, weights: Any) -> set[str]:
        own, names = dict(self.named_parameters()), set()
        for name, weight in weights:
            own[name].data.copy_(weight)
            names.add(name)
        return names

    def filled(self) -> str:
        """The layers that have all of their new weights."""
        return "".join(name for name, layer in self.named_children() if all(bool(w.all()) for w in layer.parameters()))


@pytest.fixture
async def store() -> AsyncIterator[None]:
    await ts.initialize()
    yield
    await ts.shutdown()


def reader_of(model: Layers, *, is_beside: bool) -> Any:
    form = load_form.LoadForm(model, None)
    connection = messages.TorchStoreInitInfo("", ts.DEFAULT_STORE_NAME)
    return reading.UpdateReader(form, {}, connection, CPU, part_nbytes=1, is_beside=is_beside)


def put(pieces: tuple[list[str], ...]) -> Iterator[Any]:
    """Put one piece after the other; what a worker is told of each."""
    own = dict(Layers().named_parameters())
    for number, names in enumerate(pieces):
        weights, key = {name: torch.ones_like(own[name]) for name in names}, f"piece.{number}"
        version = run(lambda weights=weights, key=key: ts.put_state_dict(weights, key))  # type: ignore[misc]
        is_last = number == len(pieces) - 1
        yield messages.TorchStoreUpdateInfo(**messages.describe(key, version, weights, is_last=is_last))


@pytest.mark.usefixtures("store")
def test_weights_beside_those_in_use_are_loaded_as_soon_as_their_layer_is_whole() -> None:
    model = Layers()
    reader = reader_of(model, is_beside=True)
    filled = []
    for info in put(PIECES):
        reader.receive(info)
        filled.append(model.filled())
    assert filled == ["0", "01", "012"]
    reader.load()
    record = reader.record()
    assert record.nbytes == record.parameter_nbytes == sum(weight.nbytes for weight in model.parameters())
    assert record.staged_nbytes <= record.parameter_nbytes / 2
    assert [call for call in model.calls if call.startswith("init")] == ["initialize"] * (len(PIECES) + 1)  # and plans


@pytest.mark.usefixtures("store")
def test_weights_in_use_change_when_all_pieces_are_there() -> None:
    model = Layers()
    reader = reader_of(model, is_beside=False)
    for info in put(PIECES):
        reader.receive(info)
        assert model.filled() == ""
    reader.load()
    assert model.filled() == "012"


@pytest.mark.usefixtures("store")
def test_a_weight_that_comes_again_when_its_layer_is_loaded_is_refused() -> None:
    reader = reader_of(Layers(), is_beside=True)
    first, again = put((["0.weight", "0.bias"], ["0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]))
    reader.receive(first)
    with pytest.raises(ValueError, match=r"0\.bias comes twice, in different pieces"):
        reader.receive(again)
    reader.close()
