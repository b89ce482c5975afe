"""The bounded memory of the store's caches."""

from skipper.torchstore.support.lru_cache import LRUCache


def test_what_was_used_least_recently_is_forgotten() -> None:
    recent: LRUCache[str, int] = LRUCache(2)
    assert recent.put("a", 1) == 1
    recent.put("b", 2)
    assert recent.get("a") == 1  # used: b is the next to go
    recent.put("c", 3)
    assert dict(recent.items()) == {"a": 1, "c": 3}
    assert recent.get("b") is None
    assert recent.newest == 3
    recent.put("a", 4)
    assert (recent.newest, len(recent), "c" in recent) == (4, 2, True)


def test_to_ask_whether_something_is_there_is_no_use_of_it() -> None:
    recent: LRUCache[str, int] = LRUCache(2)
    recent.put("a", 1)
    recent.put("b", 2)
    assert "a" in recent
    recent.put("c", 3)
    assert "a" not in recent


def test_entries_can_be_dropped() -> None:
    recent: LRUCache[str, int] = LRUCache(2)
    recent.put("a", 1)
    assert recent.pop("a") == 1
    assert recent.pop("a") is None
    recent.put("b", 2)
    recent.clear()
    assert (len(recent), recent.newest) == (0, None)
