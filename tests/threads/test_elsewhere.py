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


# ---- what a process says of itself ---------------------------------------------------------------------------


class _Looked:
    """A lookout whose thread is where the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sight: object = None
        self.place: Place | None = PLACE
        self.moves_on = False
        self.faults: list[Any] = []
        domain = SimpleNamespace(faults=lambda: self.faults)
        self.control = SimpleNamespace(store=Store(), rank=1, domains={"any": domain})
        self.lookout = elsewhere.Lookout(self.control)  # type: ignore[arg-type]
        monkeypatch.setattr(elsewhere, "_sight", lambda thread: self.sight)
        monkeypatch.setattr(elsewhere, "_place", lambda thread, control: self._find())

    def _find(self) -> Place | None:
        if self.moves_on:
            self.sight = None
        return self.place

    def beat(self, sight: object) -> str:
        self.sight = sight
        self.lookout.look(1)
        return self.control.store.get("fullshard/elsewhere/1").decode() if self.control.store else ""


def test_who_stays_is_published_and_who_goes_on_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = _Looked(monkeypatch)
    assert [looked.beat(None), looked.beat("a"), looked.beat("b")] == ["", "", ""]
    assert json.loads(looked.beat("b")) == asdict(PLACE)
    assert looked.beat("c") == ""
    assert looked.beat("c") and looked.beat(None) == ""
    looked.moves_on = True
    looked.beat("d")
    assert looked.beat("d") == ""


def test_what_is_not_clear_at_once_is_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = _Looked(monkeypatch)
    looked.place = None
    assert [looked.beat("a"), looked.beat("a")] == ["", ""]
    looked.place = PLACE
    assert looked.beat("a")


def test_the_rank_that_waits_is_told_in_its_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looked = _Looked(monkeypatch)
    looked.faults.append(SimpleNamespace(kind="disagree", text="rank 0 runs layers in another order"))
    for _ in range(3):
        looked.beat("a")
    assert not caplog.records, "its wait has nothing to do with that"
    looked.faults.append(SimpleNamespace(kind="disagree", text=f"found rank 1 in all_reduce ({PLACE.line})"))
    for _ in range(3):
        looked.beat("a")
    assert [record.getMessage() for record in caplog.records] == [
        "rank 1 waits in all_reduce (train.py:7 in train) for ever: found rank 1 in all_reduce (train.py:7 in train)"
    ]


def _frame(file: str, name: str, back: Any = None, line: int = 7, **told: Any) -> Any:
    code = SimpleNamespace(co_filename=file, co_name=name)
    return SimpleNamespace(f_code=code, f_locals=told, f_back=back, f_lineno=line, f_lasti=2)


USER = _frame("train.py", "train")
WRAPPER = _frame(f"{elsewhere._TORCH}distributed/c10d_logger.py", "wrapper", USER)


class _Process:
    """A process with groups of ranks 1 and 2 ("a") and of ranks 0 to 2 ("b"), and what it has under way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, frame: Any, *under_way: tuple[str, int, str]) -> None:
        self.a, self.b = SimpleNamespace(ranks=[1, 2]), SimpleNamespace(ranks=[0, 1, 2])
        issued = [Recorded(group, number, call, 4, False) for group, number, call in under_way]
        done = [Recorded("a", 1, "barrier", 4, True), Recorded("a", 2, "barrier", 5, False)]
        monkeypatch.setattr(elsewhere, "issued_collectives", lambda: [*done, *issued])
        monkeypatch.setattr(elsewhere, "known_groups", lambda: {"a": self.a, "b": self.b})
        monkeypatch.setattr(elsewhere, "issued_at_most", lambda group: 9)
        monkeypatch.setattr(elsewhere.dist, "get_process_group_ranks", lambda group: group.ranks)
        monkeypatch.setattr(elsewhere.dist, "group", SimpleNamespace(WORLD=self.b))
        monkeypatch.setattr(elsewhere.sys, "_current_frames", lambda: {4: frame})
        self.control: Any = SimpleNamespace(rank=1, domains={0: SimpleNamespace(prefix="mesh.1", far=FAR)})

    def place(self) -> Place | None:
        return elsewhere._place(4, self.control)


def test_the_place_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = _frame(elsewhere._C10D, "broadcast", WRAPPER, group=None, group_src=2, async_op=False)
    process = _Process(monkeypatch, frame, ("a", 3, "all_reduce"), ("b", 6, "broadcast"), ("other", 9, "all_gather"))
    assert process.place() == Place(1, "broadcast", "train.py:7 in train", "b", [0, 1, 2], 6, [2], {"mesh.1": FAR})
    frame.f_locals.update(group=process.a, group_src=1)
    found = process.place()
    assert found is not None and (found.group, found.number, found.needs) == ("a", 3, [2])
    frame.f_locals["async_op"] = True
    assert process.place() is None


def test_a_call_that_is_no_collective_has_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for file, name in ((elsewhere._C10D, "recv"), ("train.py", "all_reduce"), (elsewhere._FUNCTIONAL, "all_reduce")):
        frame = _frame(file, name, USER, group=None)
        assert _Process(monkeypatch, frame, ("b", 6, "all_reduce")).place() is None


RESULT = _frame(
    elsewhere._FUNCTIONAL, "trigger_wait", _frame(f"{elsewhere._TORCH}distributed/x.py", "full_tensor", USER)
)
WAIT = _frame(f"{elsewhere._TORCH}_ops.py", "__call__", _frame(elsewhere._FUNCTIONAL, "wait_tensor", RESULT))


def test_the_place_of_a_wait_for_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _Process(monkeypatch, WAIT, ("b", 6, "all_gather"), ("b", 7, "all_gather")).place()
    assert found == Place(1, "full_tensor", "train.py:7 in train", "b", [0, 1, 2], 6, [0, 2], {"mesh.1": FAR})
    assert _Process(monkeypatch, WAIT, ("b", 6, "all_gather"), ("a", 3, "all_reduce")).place() is None
    assert _Process(monkeypatch, WAIT, ("b", 6, "all_gather"), ("b", 7, "gather")).place() is None
    assert _Process(monkeypatch, WAIT).place() is None


def test_a_wait_for_a_message_of_one_rank_has_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = _frame(elsewhere._FUNCTIONAL, "wait_tensor", USER)
    assert _Process(monkeypatch, wait, ("b", 6, "all_gather")).place() is None


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
