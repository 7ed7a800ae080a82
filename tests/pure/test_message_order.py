"""What the order of messages notes of a program, what a failure resets, and how an unexpected message is compared."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fullshard import peers
from fullshard.agree import calls, mesh_ledger
from fullshard.agree.calls import changes_parameters
from fullshard.agree.ledger import Action, Order, Program, Question
from fullshard.agree.mesh_ledger import MessageOrder, compare_action, sizes_of
from fullshard.peers import RanksDisagree
from fullshard.peers.wait import Failures


class Scope:
    """As much of a scope as an order asks; `answers`: of the next question."""

    def __init__(self) -> None:
        self.epoch, self.doing = 0, "a step"
        self.explained_by: dict[str, Any] = {}
        self.failures = Failures()
        self.questions: list[str] = []
        self.compared: list[str] = []
        self.answers: dict[int, str] | None = None

    within = peers.Scope.within

    def agree(self, what: str, text: str) -> dict[int, str] | None:
        assert callable(self.doing) and "about to" in self.doing()
        self.questions.append(text)
        return self.answers


@pytest.fixture
def scope(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Scope()
    monkeypatch.setattr(mesh_ledger, "alike", lambda scope, text: scope.compared.append(text) is None)
    monkeypatch.setattr(mesh_ledger, "_is_native", lambda unit: False)
    return made


# ---- flags -----------------------------------------------------------------------------------------------------------


def test_what_a_program_does_is_flagged_once() -> None:
    shared = Program(0)
    shared.stepped, shared.begun = 2, True
    assert shared.flags("0-1") == ("stepped", "stepped", "train")
    assert shared.flags("0-1") == ()
    shared.stepped = 1000
    assert shared.flags("0-1") == ("stepped",) * 16, "no action of a thousand words"
    shared.begun = True
    assert shared.flags("0-1") == ()
    shared.begun = False
    assert shared.flags("0-1") == ("eval",)
    shared.begun = True
    assert shared.flags("0-1") == ("train",), "it trains again"
    # Without an optimizer each forward is a start in the end: it may update parameters itself.
    found = []
    for _ in range(70):
        shared.begun = True
        found.append(shared.flags("0-1"))
    assert found[0] == () and found[-1] == ("train",)


def test_changes_of_what_gradients_are_added_to_are_flagged(scope: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    unit: Any = Unit("root")
    messages = MessageOrder(scope, {unit: []})
    found = []
    for added in (False, True, True, False, False):
        monkeypatch.setattr(messages, "_is_added", lambda unit, added=added: added)
        messages.before(unit, "reduce", sizes="float32*8")
        found.append(tuple(str(scope.compared[-1]).split()[5:]))
    assert found == [(), ("added",), (), ("cleared",), ()]


def test_after_a_failure_all_ranks_are_at_one_place_again() -> None:
    shared, before = Program(0), Order()
    shared.order = before
    shared.stepped, shared.begun, shared.forwards, shared.added = 3, True, 9, True
    shared.trained.add("0-1")
    shared.restart(1)
    assert shared.order is not before and shared.epoch == 1
    assert (shared.stepped, shared.begun, shared.forwards, shared.added) == (0, None, 0, False) and not shared.trained


def test_which_steps_change_parameters() -> None:
    for rates, changes in (([0.1], True), ([0.0], False), ([0.0, 0.1], True), ([torch.tensor(0.0)], False)):
        groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates]
        assert changes_parameters(groups) is changes
    # The value of a rate on a device is not read; on the meta device there is none.
    assert changes_parameters([{"lr": torch.empty((), device="meta")}])


# ---- comparisons -----------------------------------------------------------------------------------------------------

GATHER = Action("unshard", "0-1", 1, "layers.1", "float32*8")
START = Action("unshard", "0-1", 0, "root", "float32*8", ("stepped",))


def known(*actions: Action) -> Order:
    """An order that expects the first of `actions`."""
    order = Order()
    for _ in range(2):
        for action in (START, *actions):
            if not order.follows(action):
                order.enter(action)
    assert order.follows(START) and order.expected() == actions[0]
    return order


def test_where_no_rank_knows_an_order_a_small_message_compares(scope: Any) -> None:
    order = Order()
    compare_action(scope, order, GATHER)
    assert scope.compared and not scope.questions and order.place == 1 and scope.doing == "a step"
    # A program that counts its messages has none more.
    compare_action(scope, order, GATHER, in_band=False)
    assert len(scope.compared) == len(scope.questions) == 1 and scope.doing == "a step"


def test_who_leaves_a_known_order_asks_through_the_store(scope: Any) -> None:
    """The others may wait for the message that was expected."""
    order = known(GATHER)
    scope.answers = {
        0: order.question(GATHER._replace(unit=2)).text,
        1: Question(order.place + 1, GATHER, GATHER).text,
    }
    later: list[object] = []
    with pytest.raises(RanksDisagree):
        compare_action(scope, order, GATHER._replace(unit=2), later=lambda *args: later.append(args))
    assert len(scope.questions) == 1 and not scope.compared and not later
    assert scope.failures.must_meet and scope.doing == "a step"


def test_on_a_device_what_no_rank_knows_is_compared_later(scope: Any) -> None:
    order, later = Order(), list[Any]()
    compare_action(scope, order, GATHER, later=lambda place, action: later.append((place, action)))
    assert later == [(0, GATHER)] and order.place == 1 and not scope.questions and not scope.compared


def test_what_is_in_doubt_is_compared_by_a_small_message_or_only_where_a_rank_leaves_it(scope: Any) -> None:
    """With a question for each, evaluations on a device would cost the store more than they do."""

    def doubtful() -> Order:
        order = known(GATHER)
        order.enter(GATHER._replace(unit=2))
        assert not order.follows(START)
        order.enter(START)
        assert order.expected() is None and order.expected(doubts=False) == GATHER._replace(unit=2)
        return order

    compare_action(scope, doubtful(), GATHER)
    assert len(scope.compared) == 1 and not scope.questions
    later: list[object] = []
    for way in ({"in_band": False}, {"later": lambda *args: later.append(args)}):
        compare_action(scope, doubtful(), GATHER, **way)  # type: ignore[arg-type]
    assert len(scope.compared) == 1 and len(scope.questions) == 2 and not later


# ---- a root ----------------------------------------------------------------------------------------------------------


class Unit:
    def __init__(self, name: str) -> None:
        self.record = SimpleNamespace(name=name, index=1)
        self.channels = SimpleNamespace(times_made=0)
        self.groups: list[Any] = []


def test_roots_are_named_by_what_all_ranks_compared_and_never_taken_for_each_other(
    scope: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh_ledger, "sizes_of", lambda unit, positions, kind, keep=False: "float32*8")
    scope.asked = 3
    units: list[Any] = [Unit("root"), Unit("root")]
    orders = [MessageOrder(scope, {unit: []}) for unit in units]
    for messages in orders:
        messages.name_root()
        scope.asked += 1
    for epoch in range(2):  # and keep their names after a failure
        scope.epoch = epoch
        scope.compared.clear()
        for messages, unit in zip(orders, units, strict=True):
            messages.before(unit, "unshard")
        assert [text.split()[2] for text in scope.compared] == ["0-3.1", "0-4.1"]


def test_sizes_are_those_of_what_is_sent_now(scope: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = iter(range(100))
    monkeypatch.setattr(mesh_ledger, "sizes_of", lambda unit, positions, kind, keep=False: f"float32*{next(counted)}")
    unit: Any = Unit("root")
    messages = MessageOrder(scope, {unit: []})

    def sent(*trainable: object) -> str:
        unit.groups = [SimpleNamespace(trainable=one) for one in trainable]
        messages.before(unit, "reduce")
        return str(scope.compared[-1]).split()[4]

    first = sent((0, 1))
    assert sent((0, 1)) == first
    assert sent((0,)) != first, "fewer parameters are trained"
    unit.channels.times_made += 1
    assert sent((0, 1)) != first, "another dtype"


def test_another_dtype_on_the_wire_is_another_message() -> None:
    def described(wire: torch.dtype) -> str:
        pack = SimpleNamespace(segments=[SimpleNamespace(padded_numel=8)], padded_local_numel=4)
        precision = SimpleNamespace(wire=wire, compute=torch.float32)
        group = SimpleNamespace(trainable=(0,), params=[None], pack=pack, precision=precision)
        links = SimpleNamespace(replicate=None, shard=SimpleNamespace(world=2), block=None)
        unit: Any = SimpleNamespace(groups=[group], links=[links])
        return sizes_of(unit, [0], "reduce")

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(mesh_ledger, "_way", lambda unit, links: "")
        assert described(torch.float32) == "float32*8" and described(torch.bfloat16) == "bfloat16*8"


def test_a_step_of_another_thread_is_none_of_the_model_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of an optimizer that another program of the process has."""
    import threading

    noted: list[Any] = []
    scope: Any = Scope()
    monkeypatch.setattr(calls, "note_stepped", lambda scope, thread: noted.append(scope))
    monkeypatch.setattr(calls, "_by_thread", {})  # models of other tests that are still there

    class Sharded:
        """What counts as a DTensor here."""

        def __init__(self, thread: int) -> None:
            owner = calls._Owned("weight", (0, 1))
            owner.formed = calls._Formed(thread, (weakref.ref(scope),))
            self.owner = owner

        def untyped_storage(self) -> Any:
            return SimpleNamespace(**{calls.Owner.ATTRIBUTE: self.owner})

    monkeypatch.setattr(calls, "DTensor", Sharded)
    for thread in (threading.get_ident() + 1, threading.get_ident()):
        optimizer: Any = SimpleNamespace(param_groups=[{"params": [Sharded(thread)], "lr": 0.1}])
        calls._optimizer_stepped(optimizer)
    assert noted == [scope]
