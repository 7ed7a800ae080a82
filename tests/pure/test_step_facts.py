"""When facts of a root are compared, what begins anew, and what ranks may differ in. The root is a stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fullshard.agree import calls, mesh_ledger
from fullshard.agree.calls import Calls
from fullshard.agree.companion import Comparing
from fullshard.agree.ledger import NOW, Fact, Ledger, Sealed, called, program_of
from fullshard.agree.mesh_ledger import MeshLedger, _Carried
from fullshard.peers import RanksDisagree

RANKS = (0, 1)


class Scope:
    """As much of a scope as facts ask."""

    def __init__(self) -> None:
        self.epoch, self.rank, self.ranks, self.watch = 0, 0, RANKS, None
        self.answers: dict[int, str] | None = None
        self.state: Any = None

    def agree(self, what: str, text: str) -> dict[int, str] | None:
        return self.answers


class Made:
    """The ledger of one unit on one mesh."""

    def __init__(self) -> None:
        self.peers = SimpleNamespace(told=[])
        self.peers.disagreeing = self._disagreeing
        ending = SimpleNamespace(is_manual=False)
        controls = SimpleNamespace(text="divide factor=2.0")
        self.unit: Any = _Unit(controls)
        self.root: Any = SimpleNamespace(units=[self.unit], run=SimpleNamespace(ending=ending), thread=0)
        self.mesh = MeshLedger(self.root, self.peers, RANKS, lambda: "")  # type: ignore[arg-type]
        self.scope = Scope()
        self.mesh.scope, self.mesh.since.epoch = self.scope, 0  # type: ignore[assignment]
        self.mesh.members = {self.unit: [0]}
        self.calls = Calls(self.root, {RANKS: self.mesh})
        # How often values were taken, and whether replicas were.
        self.values: list[bool] = []
        self.mesh.note_values = lambda *, again: self.values.append(again)  # type: ignore[method-assign]

    @contextmanager
    def _disagreeing(self, scope: object) -> Iterator[None]:
        try:
            yield
        except RanksDisagree as error:
            self.peers.told.append(str(error))
            raise

    def seal(self) -> dict[str, str]:
        sealed = self.mesh.seal()
        calls = {one.name: "" for one in sealed.statements if one.place != NOW}
        return calls | {fact.name: fact.value for one in sealed.statements for fact in one.facts if one.place == NOW}


class _Unit:
    def __init__(self, controls: Any) -> None:
        self.device = torch.device("cpu")
        self.channels = SimpleNamespace(strategy="torch")
        self.record = SimpleNamespace(name="layers.0")
        self.settings = SimpleNamespace(controls=controls)
        self.seal = SimpleNamespace(versions=[])
        self.groups = [None]


@pytest.fixture
def made() -> Made:
    return Made()


CALL = called("a call", [Fact("clip", "max_norm", "1.0")])


# ---- when values are compared ----------------------------------------------------------------------------------------


def test_values_are_taken_in_the_first_comparison_and_the_second_and_ever_more_rarely(made: Made) -> None:
    taken = []
    for count in range(1, 130):
        before = len(made.values)
        made.seal()
        if len(made.values) > before:
            taken.append((count, made.values[-1]))
    assert taken == [(1, True), (2, False), (16, False), (128, False)]
    made.mesh.since.values_asked = True  # a load
    made.seal()
    assert made.values[-1]
    count = len(made.values)
    made.seal()
    assert len(made.values) == count


@pytest.mark.parametrize("load", [False, True])
def test_where_no_message_carries_a_digest_some_forwards_that_train_compare(
    made: Made, load: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    made.mesh.only_native = True
    monkeypatch.setattr(made.mesh, "refuse", lambda scope, text: asked.append(forward))
    for forward in range(1, 20):
        if load and forward == 9:
            made.mesh.since.values_asked = True
        made.mesh.forward_begins(trains=True)
        made.mesh.forward_begins(trains=False)
    assert asked == ([1, 2, 9, 16] if load else [1, 2, 16])


def test_each_forward_that_compares_takes_the_values_outside_of_units(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.mesh.only_native = True
    monkeypatch.setattr(made.mesh, "refuse", lambda scope, text: None)
    taken = []
    for forward in range(1, 130):
        before = len(made.values)
        made.mesh.forward_begins(trains=True)
        taken += [forward] * (len(made.values) - before)
    assert taken == [1, 2, 16, 128]


@pytest.mark.parametrize(
    ("reduces", "outside", "gathers", "trains", "asked"),
    [
        (False, True, True, True, [1, 2, 16]),
        (False, True, True, False, [1, 2, 16]),  # in eval()
        (False, True, False, False, []),  # there a rank may be alone
        (False, False, True, True, []),
        (True, True, True, True, []),
    ],
)
def test_where_nothing_is_reduced_forwards_compare_what_trains_outside(
    made: Made,
    reduces: bool,
    outside: bool,
    gathers: bool,
    trains: bool,
    asked: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[int] = []
    made.mesh.only_native = False
    monkeypatch.setattr(made.mesh, "gathers", lambda: gathers)
    made.unit.record.plan = SimpleNamespace(trainable=reduces)
    made.unit.gradients = SimpleNamespace(is_known=True)
    monkeypatch.setattr(made.mesh, "_trains_outside", lambda: outside)
    monkeypatch.setattr(made.mesh, "refuse", lambda scope, text: found.append(made.mesh.since.forwards))
    for _ in range(19):
        made.mesh.forward_begins(trains=trains, records=True)
        made.mesh.forward_begins(trains=False, records=False)
    assert found == asked


def test_settings_are_told_when_they_changed(made: Made) -> None:
    name = "settings of layers.0"
    assert made.seal()[name] == "divide factor=2.0"
    made.unit.settings.controls.text = "divide factor=1.0"
    assert made.seal()[name] == "divide factor=2.0", "nothing is put together anew in a steady step"
    made.mesh.only_native = True
    made.mesh.change_settings()
    assert made.seal()[name] == "divide factor=1.0" and made.mesh.only_native is None


def test_the_source_of_a_load_and_writes_since_are_facts(made: Made) -> None:
    writes = "times that parameters of layers.0 were written"
    program_of(made.scope).source = "the checkpoint of save 7"  # type: ignore[arg-type]
    made.unit.seal.versions = [(3,)]
    said = made.seal()
    assert said["state that was loaded"] == "the checkpoint of save 7" and said[writes] == "counted from here"
    found = []
    for versions in (5, 7, 12):
        made.unit.seal.versions = [(versions,)]
        found.append(made.seal()[writes])
    # However often a step writes: that it is the same each time is what counts.
    assert found == ["counted from here", "as often as before", "3 times more often than before"]


# ---- what begins anew ------------------------------------------------------------------------------------------------


def test_after_a_failure_all_ranks_begin_anew(made: Made) -> None:
    mesh = made.mesh
    made.seal()
    mesh.ledger.do(CALL)
    mesh.ledger.hooked.append("layers.0.weight")
    mesh.since.earlier.append(_Carried(Comparison(here=True, differs=True), mesh.ledger.seal()))  # type: ignore[arg-type]
    mesh.ledger.do(CALL)
    mesh.ledger.hooked.append("layers.0.weight")
    since = mesh.since
    made.scope.epoch = 1
    assert not {"a call", "hooks"} & made.seal().keys()
    assert not mesh.since.earlier and mesh.since is not since and (mesh.since.count, mesh.since.epoch) == (1, 1)
    mesh.ledger.do(CALL)
    assert "a call" in made.seal(), "once"


def test_hooks_are_recorded_once_before_what_was_done_next(made: Made) -> None:
    made.mesh.ledger.hooked.append("weight")
    made.mesh.ledger.do(CALL)
    assert [call.name for call in made.mesh.ledger.calls] == ["hooks", "a call"]
    made.mesh.ledger.do(CALL)
    assert [call.name for call in made.mesh.ledger.calls] == ["hooks", "a call", "a call"]


# ---- a backward ------------------------------------------------------------------------------------------------------


class Comparison:
    """What a reduction carries."""

    def __init__(self, here: bool, differs: bool = False) -> None:
        self.is_here, self._differs, self.looked = here, differs, 0

    def differs(self) -> bool:
        self.looked += 1
        return self._differs


def test_one_reduction_of_a_backward_carries_a_digest(made: Made) -> None:
    plain, carries = SimpleNamespace(carries=False), SimpleNamespace(carries=True)
    carry = made.mesh.carry
    assert carry(made.unit, plain, keep=False) is None  # type: ignore[arg-type]
    # A sum that stays on the ranks that share, of which those of other replicas hear nothing.
    assert carry(made.unit, carries, keep=True) is None  # type: ignore[arg-type]
    assert carry(made.unit, carries, keep=False) is not None  # type: ignore[arg-type]
    assert carry(made.unit, carries, keep=False) is None  # type: ignore[arg-type]
    Comparing.discards(SimpleNamespace(meshes={RANKS: made.mesh}))  # type: ignore[arg-type]
    assert carry(made.unit, carries, keep=False) is not None, "of the next backward"  # type: ignore[arg-type]


def test_what_did_not_arrive_yet_is_looked_at_after_the_next_backward(made: Made) -> None:
    late, here = Comparison(here=False), Comparison(here=True)
    sealed = Ledger().seal()
    made.mesh.sent = _Carried(late, sealed)  # type: ignore[arg-type]
    made.mesh.backward_ends()
    assert not late.looked and made.mesh.sent is None
    made.mesh.sent = _Carried(here, sealed)  # type: ignore[arg-type]
    made.mesh.backward_ends()
    assert (late.looked, here.looked) == (1, 1) and not made.mesh.since.earlier


# ---- what may differ -------------------------------------------------------------------------------------------------


def sealed(*facts: Fact) -> Sealed:
    ledger = Ledger()
    for fact in facts:
        ledger.stand(fact)
    return ledger.seal()


@pytest.mark.parametrize(
    ("kind", "values", "raises"),
    [
        ("ignored", ("1", "2"), False),  # experts of a rank's own
        ("outside", ("1", None), False),  # a module that one rank has
        ("outside", ("1", "2"), True),
        ("optimizer", ("1", None), True),
    ],
)
def test_what_ranks_may_differ_in(
    made: Made, kind: str, values: tuple[str | None, ...], raises: bool, caplog: pytest.LogCaptureFixture
) -> None:
    made.scope.answers = {
        rank: sealed(*([] if value is None else [Fact(kind, "x", value)])).text for rank, value in enumerate(values)
    }
    if raises:
        with pytest.raises(RanksDisagree, match="x: expected the same on every rank"):
            made.mesh.refuse(made.scope, "")  # type: ignore[arg-type]
    else:
        made.mesh.refuse(made.scope, "")  # type: ignore[arg-type]
    # Ranks of another mesh of the root would wait.
    assert len(made.peers.told) == raises
    assert made.mesh.own == (set() if raises else {"x"})
    assert len(caplog.records) == (kind == "ignored")


def test_buffers_that_differ_are_warned_of_once_and_end_nothing(made: Made) -> None:
    """Nothing averages them: running statistics of each rank differ from the first step on."""
    values = {0: {"mean": "1", "cache": "7"}, 1: {"mean": "2"}}
    made.scope.answers = {
        rank: sealed(*(Fact("buffers", name, value) for name, value in found.items())).text
        for rank, found in values.items()
    }
    with pytest.warns(UserWarning, match=r"since the training began: nothing averages them: mean \(rank 0 unlike"):
        made.mesh.refuse(made.scope, "")  # type: ignore[arg-type]
    assert not made.mesh.compares_buffers and made.mesh.own == {"cache"} and not made.peers.told


def test_buffers_join_later_comparisons_until_they_differ(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first one they are equal: the first forward compared them."""
    mesh, found = made.mesh, []
    made.unit.module = nn.Module()
    monkeypatch.setattr(mesh_ledger, "replicas_of", lambda units, top: {})
    monkeypatch.setattr(mesh, "outside", lambda: {})
    monkeypatch.setattr(mesh_ledger, "buffers_on", lambda top, ranks: {"mean": torch.ones(1)})
    for count in (1, 2, 16):
        mesh.since.count = count
        mesh.compares_buffers = count < 16
        MeshLedger.note_values(mesh, again=False)
        (call, _) = mesh.ledger.seal().statements
        found.append([fact.name for fact in call.facts])
    assert found == [[], ["mean"], []]


def test_what_was_allowed_is_not_compared_again_and_what_drifts_is_no_ignored_one(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = made.mesh
    made.unit.module = nn.Module()
    monkeypatch.setattr(mesh_ledger, "replicas_of", lambda units, top: {})
    monkeypatch.setattr(mesh, "outside", lambda: {"a": torch.ones(1), "b": torch.ones(1)})
    monkeypatch.setattr(mesh_ledger, "ignored_by", lambda units: frozenset({"b"}))
    mesh.own.add("a")
    kinds = []
    for count in (1, 2):
        mesh.since.count = count
        MeshLedger.note_values(mesh, again=False)
        (call, _) = mesh.ledger.seal().statements
        kinds.append([(fact.kind, fact.name) for fact in call.facts])
    assert kinds == [[("ignored", "b")], [("outside", "b")]]


# ---- which parameters ------------------------------------------------------------------------------------------------


def test_each_call_has_its_own_parameters(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    monkeypatch.setattr(made.calls, "_placed_now", lambda: {id(a): (RANKS, "a"), id(b): (RANKS, "b")})
    for given in ([a], [b], [a, b], [a]):
        made.calls.done_to(given, "clip", [Fact("clip", "max_norm", "1.0")])
    assert [call.facts[-1].value for call in made.mesh.ledger.calls] == ["a", "b", "a, b", "a"]


def test_parameters_are_found_again_after_their_shards_were_made_anew(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    param: Any = _Unit(None)
    param.sharded = nn.Parameter(torch.ones(1))
    unit: Any = _Unit(None)
    unit.channels, unit.groups = SimpleNamespace(times_made=1), [SimpleNamespace(params=[param])]
    made.root.units = [SimpleNamespace(module=None, channels=SimpleNamespace(times_made=0)), unit]
    made.mesh.members = {unit: [0]}
    monkeypatch.setattr(calls, "parameter_names", lambda top, units: _Named())
    monkeypatch.setattr(made.mesh, "outside", lambda: {})
    assert set(made.calls._placed_now()) == {id(param.sharded)}
    param.sharded = nn.Parameter(torch.ones(1))
    assert id(param.sharded) not in made.calls._placed_now(), "nobody looks in a steady step"
    unit.channels.times_made += 1
    assert set(made.calls._placed_now()) == {id(param.sharded)}


class _Named(dict[Any, str]):
    def __missing__(self, key: object) -> str:
        return "weight"


def test_an_optimizer_that_got_another_parameter_is_described_anew(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    monkeypatch.setattr(made.calls, "_placed_now", lambda: {id(a): (RANKS, "a"), id(b): (RANKS, "b")})
    optimizer = torch.optim.SGD([a], lr=0.1)
    for _ in range(2):
        made.calls.optimizer_stepped(optimizer)
        optimizer.param_groups[0]["params"] = [b]
    named = [{fact.name: fact.value for fact in call.facts} for call in made.mesh.ledger.calls]
    assert named[0]["parameters of the optimizer"] != named[1]["parameters of the optimizer"]
