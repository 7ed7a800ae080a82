"""The rules by which a rank that waits tells a peer in a collective that ends nowhere from one that is slow.

Each of them alone keeps a program that is right from an error (comm/elsewhere.py). tests/procs/test_elsewhere.py has
such programs.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fullshard._torch_compat import Recorded, issued_collectives, known_groups
from fullshard.comm import elsewhere
from fullshard.comm.elsewhere import Place, find, find_for

FAR = {"epoch": 2, "issued": {"small 0.1": 4}, "asked": 7}
PLACE = Place(1, "all_reduce", "train.py:7 in train", "0", [0, 1], 5, [0], {"mesh.1": FAR})


class Store(dict[str, str]):
    def set(self, key: str, value: str) -> None:
        self[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key].encode()


def _domain(**more: Any) -> Any:
    """Of rank 0, among three."""
    control = SimpleNamespace(store=Store(), rank=0, domains={})
    domain = SimpleNamespace(
        rank=0, ranks=(0, 1, 2), epoch=2, prefix="mesh.1", control=control, step=lambda: 3, waiting=None
    )
    domain.__dict__.update(more)
    return domain


def _told(domain: Any, *places: Place) -> Any:
    for place in places:
        domain.control.store.set(f"fullshard/elsewhere/{place.rank}", json.dumps(asdict(place)))
    return domain


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """What this process did: collectives over group "0", and what its counter says."""

    def set_up(numbers: tuple[int, ...] = (3, 4), counter: int = 4, ranks: tuple[int, ...] = (0, 1)) -> None:
        group = object()
        issued = [Recorded("0", number, "all_reduce", 1, True) for number in numbers]
        monkeypatch.setattr(elsewhere, "issued_collectives", lambda: issued)
        monkeypatch.setattr(elsewhere, "known_groups", lambda: {"0": group})
        monkeypatch.setattr(elsewhere, "issued_at_most", lambda which: counter)
        monkeypatch.setattr(elsewhere.dist, "get_process_group_ranks", lambda which: list(ranks))

    set_up()
    return set_up


def _accused(domain: Any, asked: int = 7) -> str | None:
    fault = find(domain, "the gather of layers.1", lambda rank, far: far["asked"] <= asked)
    assert fault is None or (fault.kind, fault.rank, fault.step) == ("disagree", 0, 3)
    return None if fault is None else fault.text


def test_a_peer_that_waits_for_this_rank_is_named(here: Callable[..., None]) -> None:
    assert _accused(_told(_domain(), PLACE)) == (
        "expected all ranks to take the same calls, found rank 1 in all_reduce (train.py:7 in train), which needs "
        "ranks 0 and 1, while rank 0 waits for rank 1 in the gather of layers.1: neither can go on; let ranks 0 and 1 "
        "make that call at the same place, or none of them (not under `if rank == ...`)"
    )


def test_several_peers_in_one_collective_are_named_together(here: Callable[..., None]) -> None:
    here(ranks=(0, 1, 2))
    place = replace(PLACE, ranks=[0, 1, 2])
    text = _accused(_told(_domain(), place, replace(place, rank=2)))
    assert text is not None and "found ranks 1 and 2 in all_reduce" in text


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(replace(PLACE, needs=[2]), id="it needs another rank"),
        pytest.param(replace(PLACE, number=4), id="this rank has issued it"),
        pytest.param(replace(PLACE, ranks=[0, 1, 2]), id="another group of that name"),
        pytest.param(replace(PLACE, group="1"), id="a group that is not known here"),
        pytest.param(replace(PLACE, far={}), id="no domain in common"),
        pytest.param(replace(PLACE, far={"mesh.1": FAR | {"epoch": 1}}), id="from before the last meeting"),
        pytest.param(replace(PLACE, far={"mesh.1": FAR | {"asked": 8}}), id="it has done what is waited for"),
    ],
)
def test_who_does_not_wait_for_this_rank_is_not_accused(place: Place, here: Callable[..., None]) -> None:
    assert _accused(_told(_domain(), place)) is None


def test_a_place_that_was_left_is_none(here: Callable[..., None]) -> None:
    domain = _told(_domain(), PLACE)
    domain.control.store.set("fullshard/elsewhere/1", "")
    assert _accused(domain) is None


@pytest.mark.parametrize(
    ("numbers", "counter", "accused"),
    [
        ((3, 4), 9, True),  # nine with messages to one rank
        ((), 4, True),  # the recorder has dropped them, and there were fewer anyway
        ((), 5, False),  # nobody knows
        ((88, 89), 4, True),  # of a group of that name that was destroyed
        ((4, 5), 5, False),
        ((4, 5, 6), 6, False),
    ],
)
def test_how_many_were_issued(numbers: tuple[int, ...], counter: int, accused: bool, here: Callable[..., None]) -> None:
    here(numbers, counter)
    assert (_accused(_told(_domain(), PLACE)) is not None) is accused


def test_messages_that_the_peer_has_sent_will_come(here: Callable[..., None]) -> None:
    domain = _told(_domain(), PLACE)

    def waits(number: int, *, line: str = "small 0.1", ranks: tuple[int, ...] = (0, 1), waiting: bool = True) -> bool:
        sent: Any = SimpleNamespace(line=SimpleNamespace(name=line, ranks=ranks), number=number)
        domain.waiting = sent if waiting else None
        return find_for(domain, "", sent) is not None

    assert waits(5)
    assert not waits(4), "it has sent the fourth"
    assert not waits(5, waiting=False), "a device waits, and the host goes on"
    assert waits(1, line="large 0.1"), "it has not opened that line"
    assert not waits(1, line="small 0.2", ranks=(0, 2)), "the line of other ranks"


@pytest.mark.parametrize(
    ("call", "rank", "root", "needs"),
    [
        ("all_reduce", 4, None, [2, 6]),
        ("all_gather", 4, None, [2, 6]),
        ("all_to_all", 4, None, [2, 6]),
        ("barrier", 4, None, [2, 6]),
        ("broadcast", 4, 6, [6]),  # not the others that receive
        ("scatter", 4, 6, [6]),
        ("broadcast", 4, 4, []),  # it may have sent to some and not to others
        ("reduce", 4, 4, [2, 6]),
        ("gather", 4, 4, [2, 6]),
        ("gather", 4, 6, []),
        ("broadcast", 4, None, []),
        ("send", 4, None, []),
    ],
)
def test_whom_a_collective_needs(call: str, rank: int, root: int | None, needs: list[int]) -> None:
    assert elsewhere._needs(call, rank, [2, 4, 6], root) == needs
    assert elsewhere._needs(call, 4, [4, 6], 4) == [6], "of two ranks each needs the other"


def test_a_thread_that_computes_is_nowhere() -> None:
    goes, ended = threading.Event(), threading.Event()

    def work() -> None:
        goes.set()
        ended.wait(20)

    thread = threading.Thread(target=work)
    thread.start()
    goes.wait(20)
    assert thread.ident is not None and elsewhere._sight(thread.ident) is None
    ended.set()
    thread.join()
    assert elsewhere._sight(threading.get_ident()) is None and elsewhere._sight(1) is None


def test_what_torch_records(tmp_path: Any) -> None:
    """The numbers that all of this rests on: of collectives alone, in their order, with the thread that issued them."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        known = len(issued_collectives())
        dist.all_reduce(torch.ones(1))
        dist.barrier()
        dist.broadcast(torch.ones(1), 0)
        new = issued_collectives()[known:]
        assert [one.call for one in new] == ["all_reduce", "barrier", "broadcast"]
        assert [one.number for one in new] == [1, 2, 3]
        assert {one.thread for one in new} == {threading.get_ident()}
        assert {one.group for one in new} == set(known_groups())
        assert new[0].is_over
    finally:
        dist.destroy_process_group()


def test_a_group_that_does_not_count_proves_nothing() -> None:
    class Uncounted:
        def _get_backend(self, device: torch.device) -> Any:
            raise RuntimeError("no backend for the host")

    from fullshard._torch_compat import issued_at_most

    assert issued_at_most(Uncounted()) == sys.maxsize  # type: ignore[arg-type]
