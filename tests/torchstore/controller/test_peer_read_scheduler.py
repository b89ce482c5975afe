"""Who is sent to whose copy: decided without processes."""

import asyncio
from dataclasses import replace

from skipper.torchstore.controller.peer_read_scheduler import Patience, PeerReadScheduler
from skipper.torchstore.protocol.messages import Share
from skipper.torchstore.support.process import ProcessId, this_process

CIRCLE = "same boxes"


def reader(number: int) -> ProcessId:
    return replace(this_process(), pid=number)


def share_of(number: int) -> Share:
    return Share("manifest", "binding", 1, reader(number))


def begin(offers: PeerReadScheduler, lease: int) -> int | None:
    """Reader number ``lease`` comes: whose copy it reads (0: the publisher's), or None if it has to wait."""
    if offers.must_wait(CIRCLE, reader(lease)):
        return None
    offer = offers.choose(CIRCLE, reader(lease))
    offers.begin(CIRCLE, lease, reader(lease), offer)
    return offer.share.writer.pid if offer is not None else 0


def finish(offers: PeerReadScheduler, lease: int, *, lends: bool = True, failed: bool = False) -> None:
    offers.finish(lease, share_of(lease) if lends else None, failed=failed)
    offers.end(lease)


def test_the_first_goes_to_the_publisher_and_the_others_wait_for_copies() -> None:
    offers = PeerReadScheduler()
    assert begin(offers, 1) == 0
    assert begin(offers, 2) is None
    finish(offers, 1)
    assert [begin(offers, number) for number in (2, 3, 4)] == [1, 1, None]
    finish(offers, 2)
    assert sorted(begin(offers, number) or 0 for number in (4, 5, 6)) == [1, 2, 2]
    assert begin(offers, 7) is None


def test_circles_know_nothing_of_each_other() -> None:
    offers = PeerReadScheduler()
    assert begin(offers, 1) == 0
    assert not offers.must_wait("other boxes", reader(2))
    finish(offers, 1)
    assert offers.choose("other boxes", reader(2)) is None


def test_a_reader_that_dies_lets_the_next_one_go_to_the_publisher() -> None:
    offers = PeerReadScheduler()
    assert begin(offers, 1) == 0
    offers.end(1)
    assert begin(offers, 2) == 0


def test_nobody_waits_where_a_reader_had_nothing_to_offer() -> None:
    offers = PeerReadScheduler()
    assert begin(offers, 1) == 0
    finish(offers, 1, lends=False)
    assert [begin(offers, number) for number in (2, 3, 4)] == [0, 0, 0]


def test_a_copy_that_could_not_be_read_is_nobodys_any_more() -> None:
    offers = PeerReadScheduler()
    begin(offers, 1)
    finish(offers, 1)
    assert begin(offers, 2) == 1
    finish(offers, 2, failed=True)
    assert begin(offers, 3) == 2


def test_a_copy_that_is_taken_back_has_its_readers_until_they_leave() -> None:
    offers = PeerReadScheduler()
    begin(offers, 1)
    finish(offers, 1)
    assert begin(offers, 2) == 1
    offers.close(reader(1))
    assert offers.readers(reader(1)) == (reader(2),)
    assert begin(offers, 3) is None  # for the copy that 2 will have
    offers.end(2)
    assert offers.readers(reader(1)) == ()
    assert begin(offers, 3) == 0


def test_nobody_is_sent_to_a_copy_of_its_own() -> None:
    offers = PeerReadScheduler()
    begin(offers, 1)
    finish(offers, 1)
    assert offers.choose(CIRCLE, reader(1)) is None


async def test_patience_ends_and_says_so() -> None:
    over = asyncio.Event()
    patience = Patience(0.05, over.set)
    assert not patience.is_over()
    async with asyncio.timeout(20):
        await over.wait()
    assert patience.is_over()
