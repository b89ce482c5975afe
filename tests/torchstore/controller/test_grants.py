"""What readers are told of a version."""

import pickle

import pytest

from skipper.torchstore.algebra.layout import Layout, Shard
from skipper.torchstore.algebra.manifest import Binding, Manifest
from skipper.torchstore.controller.grants import grant_all
from skipper.torchstore.controller.index import Index
from skipper.torchstore.protocol.messages import Grant, Share, Wanted
from skipper.torchstore.support.process import ProcessId
from tests.torchstore.controller.test_history import shard

READER = ProcessId("here", 900, 1)


def published(ranks: int) -> Index:
    index = Index(lambda process, binding: None, lambda memory, spoilt: None, lambda history: None)
    publish(index, ranks, step=1)
    return index


def publish(index: Index, ranks: int, step: int) -> None:
    layout = Layout((ranks,), (ranks,), (Shard(0),))
    for rank in range(ranks):
        index.contribute("w", shard(rank, layout=layout, binding=f"memory {rank} {step}", step=step), None)


def granted(index: Index, known: tuple[str, ...] = ()) -> Grant:
    grants = grant_all(index, (Wanted("w", known=known),), READER, 0.0)
    assert grants is not None
    return grants[0]


def records(grant: Grant) -> tuple[str, ...]:
    told = [record for share in grant.shares for record in (share.manifest, share.binding)]
    return tuple(record.id for record in told if isinstance(record, Manifest | Binding))


@pytest.mark.parametrize("ranks", [3, 16, 40])
def test_a_reader_that_knows_all_records_is_told_their_ids(ranks: int) -> None:
    index = published(ranks)
    first = granted(index)
    known = records(first)
    assert len(known) == 2 * ranks
    later = granted(index, known)
    assert records(later) == ()
    assert [(share.manifest, share.binding) for share in later.shares] == list(
        zip(known[::2], known[1::2], strict=True)
    )
    assert [(share.writer, share.generation) for share in later.shares] == [
        (share.writer, share.generation) for share in first.shares
    ]


def test_a_reader_that_lacks_one_record_is_told_that_one_whole() -> None:
    index = published(40)
    known = records(granted(index))
    granted(index, known)
    assert records(granted(index, known[1:])) == known[:1]


def test_readers_are_told_of_the_version_that_is_there_now() -> None:
    index = published(40)
    known = records(granted(index))
    before = granted(index, known)
    publish(index, 40, step=2)
    after = granted(index, known)
    assert after.version == before.version + 1
    assert records(after) == tuple(f"memory {rank} 2" for rank in range(40))


def test_shares_that_are_told_to_many_arrive_as_they_are() -> None:
    index = published(40)
    known = records(granted(index))
    grant = granted(index, known)
    assert granted(index, known).shares is grant.shares
    arrived = pickle.loads(pickle.dumps(grant)).shares
    assert type(arrived) is tuple
    assert arrived == tuple(grant.shares)
    assert all(isinstance(share, Share) for share in arrived)
