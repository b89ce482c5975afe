"""What a reader keeps of what it was told."""

from skipper.torchstore.algebra.layout import Layout, Shard
from skipper.torchstore.algebra.manifest import Binding
from skipper.torchstore.clients.catalog import Catalog, Opened
from skipper.torchstore.protocol.messages import Grant, Share
from tests.torchstore.controller.test_history import manifest, process

ROWS = Layout((8,), (4,), (Shard(0),))


def opened(catalog: Catalog, version: int, *, layout: Layout = ROWS) -> Opened:
    shares = tuple(
        Share(manifest(layout, (rank,)), Binding(f"memory {rank}", "direct", "", ()), version, process(rank))
        for rank in range(4)
    )
    return catalog.open(catalog.recall("w"), Grant("w", version, 1, shares), lambda holders: holders[0])


def test_versions_of_one_layout_share_what_is_said_of_their_tensors() -> None:
    catalog = Catalog()
    first, second = opened(catalog, 1), opened(catalog, 2)
    assert first.tensors() is second.tensors()
    assert list(first.tensors()) == [""]


def test_a_version_of_another_layout_has_tensors_of_its_own() -> None:
    catalog = Catalog()
    first, second = opened(catalog, 1), opened(catalog, 2, layout=Layout((12,), (4,), (Shard(0),)))
    assert (first.tensors()[""].global_shape, second.tensors()[""].global_shape) == ((8,), (12,))


def test_a_deleted_key_is_forgotten() -> None:
    catalog = Catalog()
    first = opened(catalog, 1)
    catalog.forget(["w"])
    assert opened(catalog, 1).tensors() is not first.tensors()
