"""Each start of the ranks has a store of its own, whatever earlier starts have left in the one beneath."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import HashStore, Store

from dsjob.errors import LaunchError
from dsjob.ranks import meeting


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """The store that `open_store` finds, as if torchrun had made it."""
    beneath = HashStore()
    monkeypatch.delenv(meeting.STORE_VARIABLE, raising=False)
    monkeypatch.setattr(meeting.dist, "rendezvous", lambda *_, **__: iter([(beneath, 0, 0)]))
    monkeypatch.setattr(meeting, "_lasting", None)
    return beneath


def open_all(world_size: int) -> list[Store]:
    opened: dict[int, Store] = {}

    def open_one(rank: int) -> None:
        opened[rank] = meeting.open_store(rank, world_size, 20.0)

    threads = [threading.Thread(target=open_one, args=(rank,)) for rank in reversed(range(world_size))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [opened[rank] for rank in range(world_size)]


def test_a_later_start_sees_nothing_of_an_earlier_one(store: Store) -> None:
    first = open_all(3)
    first[1].set("key", "first")
    assert first[2].get("key") == b"first"
    store.append("dsjob/questions", "of-a-rank-that-was-killed-before-it-had-an-answer ")
    second = open_all(3)
    assert not second[0].check(["key"])
    second[2].set("key", "second")
    assert [each.get("key") for each in second] == [b"second"] * 3


def test_what_is_kept_outlives_a_start(store: Store) -> None:
    open_all(2)
    assert meeting.recall("folder") is None
    meeting.keep("folder", "outputs/here")
    open_all(2)
    assert meeting.recall("folder") == "outputs/here"


def test_ranks_that_do_not_come_are_named(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "LONGEST_WAY", 0.0)
    with pytest.raises(LaunchError, match=r"2 of 3 ranks did not join within 0\.05 s: 1, 2"):
        meeting.open_store(0, 3, 0.05)


def test_a_rank_that_rank_0_does_not_answer_says_so(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "LONGEST_WAY", 0.0)
    with pytest.raises(LaunchError, match=r"rank 1: rank 0 did not join within 0\.05 s"):
        meeting.open_store(1, 3, 0.05)


class Counting:
    """A store that counts how often it is asked."""

    def __init__(self, store: Store) -> None:
        self._store, self.calls = store, 0

    def __getattr__(self, name: str) -> object:
        self.calls += 1
        return getattr(self._store, name)


def test_rank_0_asks_the_store_as_often_for_many_ranks_as_for_few(store: Store) -> None:
    size, counting = 128, Counting(store)
    store.set_timeout(timedelta(seconds=20))
    threads = [threading.Thread(target=meeting._ask_for_name, args=(store, rank, 20.0)) for rank in range(1, size)]
    for thread in threads:
        thread.start()
    meeting._name_start(counting, size, 20.0)  # type: ignore[arg-type]
    for thread in threads:
        thread.join()
    assert counting.calls < size
