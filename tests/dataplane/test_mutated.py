"""The program that mutates handles by the thousand, with a small count; and that it would notice."""

import pytest

from skipper.dataplane.keys import Keys
from tests.dataplane import mutated

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("way", mutated.WAYS)
def test_mutated_handles_do_no_harm(way: str) -> None:
    counts, found = mutated.run(400, 7, [way])
    assert not found
    assert sum(counts.values()) == 400
    assert counts["refused"] > 200
    assert counts["failed"] > 20
    assert counts["read"] > 0


def test_a_handle_that_is_believed_without_a_proof_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, not in processes of their own: nothing but reads of shared memory that is there."""
    memory = mutated.Reader(shared=True)
    _, raw = memory.make(b"\x11" * mutated.NBYTES)
    monkeypatch.setattr(Keys, "open", lambda _, card, sealed: sealed[:-49] if sealed[-1] == 2 else sealed[:-25])
    counts, found, _ = memory.attack("shm", [raw], [], 3, 200)
    assert counts["accepted"] > 0
    assert "without a good proof" in found[0]
