"""The other ranks of a root when a step fails: what each learns, what a meeting refuses, what a load restores, and what
a guarded block sees of a step. Ranks are simulated (benchmarks/simulated_ranks.py)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.simulated_ranks import Simulation
from fullshard.agree import guarded_steps, recovery
from fullshard.agree.guarded_steps import GuardedSteps, arrive
from fullshard.agree.ledger import program_of
from fullshard.agree.recovery import Peers, Recovery, refuse_mixed_states
from fullshard.engine import optimizer_steps
from fullshard.peers import Fault, PeerFailed, RanksDisagree, Scope, had_losses


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulation]:
    """Two ranks, each with two meshes: all of them, and the same ranks once more."""
    monkeypatch.setattr(optimizer_steps, "asked_on_devices", [])
    with Simulation(2, silence=20.0) as simulation:
        simulation.run(5)
        yield simulation
        for watch in simulation.watches:
            for scope in watch.scopes.values():
                had_losses.pop(id(scope), None)


def peers_of(simulation: Simulation, rank: int) -> Peers:
    found = Peers((), threading.get_ident())
    found.scopes = [simulation.scopes[rank], simulation.watches[rank].scope((0, 1), "the other mesh")]
    return found


def fault(scope: Scope, kind: str = "raised") -> Fault:
    return Fault(1, kind, "why", scope.name, scope.epoch)


def on_both(simulation: Simulation, call: Any) -> list[Any]:
    """What `call(rank)` returns or raises on each rank."""
    simulation.returned.clear()
    simulation.raised.clear()
    for rank in range(2):
        simulation.start(rank, lambda rank=rank: call(rank))  # type: ignore[misc]
    simulation.run(20)
    return [simulation.raised.get(rank, simulation.returned.get(rank)) for rank in range(2)]


# ---- who learns of it ------------------------------------------------------------------------------------------------


def test_a_failure_is_told_on_all_meshes_with_what_the_rank_did(two: Simulation) -> None:
    peers = peers_of(two, 0)
    peers.publish(ValueError("no such token"), "the forward of layers.3")
    for scope in peers.scopes:
        own = scope.failures.own
        assert own is not None and (own.text, own.doing) == ("ValueError: no such token", "the forward of layers.3")
        assert scope.doing == "" and scope.failures.must_meet and scope.failures.has_raised


@pytest.mark.parametrize(
    ("heard", "error", "told"),
    [
        (2, PeerFailed("rank 1 failed", rank=1), False),
        (2, None, False),
        (2, ValueError("of its own"), True),  # whose cause the others could not know
        (1, PeerFailed("rank 1 failed", rank=1), True),  # ranks of the other mesh have heard of nothing
        (0, PeerFailed("rank 1 failed", rank=1), True),
    ],
)
def test_what_follows_from_a_failure_is_told_where_nobody_knows_of_it(
    two: Simulation, heard: int, error: BaseException | None, told: bool
) -> None:
    peers = peers_of(two, 0)
    for scope in peers.scopes[:heard]:
        scope.note_fault(fault(scope), two.now)
    peers.publish(error, "a step")
    assert [scope.failures.own is not None for scope in peers.scopes] == [told] * 2
    assert all(scope.failures.must_meet for scope in peers.scopes)


def test_a_disagreement_is_told_to_ranks_of_other_meshes_once(two: Simulation) -> None:
    peers = peers_of(two, 0)
    one, other = peers.scopes
    with pytest.raises(RanksDisagree), peers.disagreeing(one):
        raise RanksDisagree("they differ")
    assert one.failures.own is None
    assert other.failures.own is not None and (other.failures.own.kind, other.failures.own.text) == (
        "disagree",
        "they differ",
    )
    # The other ranks of the first mesh tell the same; it is raised already.
    other.note_fault(fault(other, "disagree"), two.now)
    other.refuse_failure()


def test_a_disagreement_that_is_met_is_told_on(two: Simulation) -> None:
    peers = peers_of(two, 0)
    one, other = peers.scopes
    one.note_fault(fault(one, "disagree"), two.now)
    with pytest.raises(RanksDisagree):
        peers.meet()
    assert other.failures.own is not None and other.failures.own.kind == "disagree"


def test_attempts_are_counted(two: Simulation) -> None:
    peers = peers_of(two, 0)
    for attempt in (1, 2):
        peers.attempt_failed(ValueError("no"), "a block")
        assert [scope.failures.own.attempts for scope in peers.scopes if scope.failures.own] == [attempt] * 2


# ---- together --------------------------------------------------------------------------------------------------------


def test_ranks_come_together_twice(two: Simulation) -> None:
    """A rank that was interrupted after its first message is missed in the second one."""
    assert on_both(two, lambda rank: peers_of(two, rank).come_together("the end")) == [None, None]
    assert [scope.asked for scope in peers_of(two, 0).scopes] == [2, 2]


def test_ranks_at_other_calls_do_not_come_together(two: Simulation) -> None:
    for error in on_both(two, lambda rank: peers_of(two, rank).come_together("the end" if rank else "the step of SGD")):
        assert isinstance(error, RanksDisagree), error


def test_all_meshes_that_failed_are_met(two: Simulation) -> None:
    for rank in range(2):
        peers_of(two, rank).publish(ValueError("no"), "a step")
        two.groups[rank].is_cut = True
    assert on_both(two, lambda rank: peers_of(two, rank).meet()) == [True, True]
    assert {scope.epoch for rank in range(2) for scope in peers_of(two, rank).scopes} == {1}


def test_a_failure_is_raised_before_it_is_met(two: Simulation) -> None:
    peers = peers_of(two, 0)
    peers.scopes[0].fail(fault(peers.scopes[0]))
    with pytest.raises(PeerFailed):
        peers.meet()
    assert peers.scopes[0].epoch == 0


# ---- steps that ranks took -------------------------------------------------------------------------------------------


def met_with(simulation: Simulation, counts: tuple[int, int], half: tuple[str, str]) -> list[Any]:
    """What ranks that took so many steps come to when they meet after a failure."""
    for rank, scope in enumerate(simulation.scopes):
        taken = program_of(scope)
        taken.count, taken.half = counts[rank], half[rank]
        scope.publish("raised", "ValueError: no")
    simulation.run(3)

    def meet(rank: int) -> None:
        peers = Peers((), threading.get_ident())
        peers.scopes = [simulation.scopes[rank]]
        peers.meet()

    return on_both(simulation, meet)


@pytest.mark.parametrize(
    ("counts", "half", "words"),
    [
        ((2, 3), ("", ""), "found 2 on rank 0 and 3 on rank 1"),
        ((2, 2), ("SGD", "SGD"), "found 2, and the middle of one of SGD, on ranks 0 and 1"),
        ((2, 2), ("", "SGD"), "and the middle of one of SGD, on rank 1"),
        ((2, 2), ("", ""), ""),
    ],
)
def test_ranks_train_on_with_shards_of_one_step_alone(
    two: Simulation, counts: tuple[int, int], half: tuple[str, str], words: str
) -> None:
    for error in met_with(two, counts, half):
        assert error is None if not words else isinstance(error, RanksDisagree) and words in str(error)
    # They are asked again in the next forward, whatever they did meanwhile.
    assert [scope.failures.must_meet for scope in two.scopes] == [bool(words)] * 2


def test_a_load_brings_them_together(two: Simulation) -> None:
    for scope in two.scopes:
        program_of(scope).count, program_of(scope).half = 7, "SGD"
        program_of(scope).forget_steps("the checkpoint of save 7")
        assert program_of(scope).word() == "0"
        program_of(scope).forget_steps("")
        assert program_of(scope).source == "the checkpoint of save 7", "a load that says less takes nothing back"
    assert met_with(two, (0, 0), ("", "")) == [None, None]


def test_a_model_that_all_ranks_lost_is_refused(two: Simulation) -> None:
    scope = two.scopes[0]
    scope.states = {"0!1": [0, 1]}
    with pytest.raises(RanksDisagree, match="lost on a device"):
        refuse_mixed_states([scope])
    assert scope.failures.must_meet


# ---- what a load restores --------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.empty = nn.Parameter(torch.empty(0))
        self.register_buffer("mask", torch.ones(2), persistent=False)


def lose(two: Simulation) -> Scope:
    scope = two.scopes[0]
    scope.fail(fault(scope), spoiled="the reduction of layers.0")
    return scope


def test_all_that_a_load_brings_has_to_be_loaded_and_a_load_that_failed_does_not_count(two: Simulation) -> None:
    model = Model()
    found = Recovery(model, (), [two.scopes[0]])
    assert not found.missing()
    scope = lose(two)
    own = ["first.weight", "first.bias", "norm.weight", "norm.bias"]
    own += ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    # Neither empty tensors nor buffers that no load brings.
    assert sorted(found.missing()) == sorted(own)
    state = model.state_dict()
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(state | {"first.weight": torch.ones(3, 3)})
    assert found.missing() == ["first.weight", "first.bias"], "of the modules whose load raised nothing"
    model.load_state_dict({"first.weight": state["first.weight"]}, strict=False)
    assert found.missing() == ["first.bias"] and scope.losses.current is not None
    model.load_state_dict({"first.bias": state["first.bias"]}, strict=False)
    assert not found.missing() and scope.losses.current is None


def test_all_models_of_a_mesh_have_to_be_loaded(two: Simulation) -> None:
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    kept = [Recovery(model, (), [two.scopes[0]]) for model in models]
    scope = lose(two)
    for model in models:
        assert scope.losses.current is not None
        model.load_state_dict(model.state_dict())
    assert scope.losses.current is None and not any(one.missing() for one in kept)


def test_an_optimizer_goes_on_with_state_that_is_sound(two: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    scope = two.scopes[0]
    monkeypatch.setattr(recovery, "_scopes_of", lambda optimizer: [scope])
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    used, fresh = (torch.optim.SGD([parameter], lr=0.1, momentum=0.9) for _ in range(2))
    ask = recovery._step_on_device
    ask(used)
    used.step()
    lose(two)
    with pytest.raises(RanksDisagree, match="lost on a device"):
        ask(used)
    scope.losses.restore()
    with pytest.raises(RuntimeError, match="state that was loaded after the model was lost"):
        ask(used)
    fresh.load_state_dict(used.state_dict())
    ask(fresh)
    used.load_state_dict(used.state_dict())
    ask(used)


def test_an_optimizer_that_never_stepped_has_no_state_from_before(
    two: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some make their state when they are built."""
    scope = two.scopes[0]
    monkeypatch.setattr(recovery, "_scopes_of", lambda optimizer: [scope])
    optimizer = torch.optim.Adagrad([nn.Parameter(torch.ones(1))])
    lose(two)
    scope.losses.restore()
    assert optimizer.state
    recovery._step_on_device(optimizer)


# ---- steps in a guarded block ----------------------------------------------------------------------------------------


class Others:
    """The peers of a block: what it came together for."""

    def __init__(self, scopes: Any = ()) -> None:
        self.scopes, self.met, self.together = list(scopes), 0, list[str]()

    def come_together(self, what: str) -> None:
        self.together.append(what)

    def meet(self) -> bool:
        self.met += 1
        for scope in self.scopes:
            scope.failures.must_meet = False
        return True


def optimizers(count: int = 2) -> list[Any]:
    made = [torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, foreach=False) for _ in range(count)]
    for optimizer in made:
        optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    return made


def test_ranks_come_together_before_the_first_step_of_each_optimizer() -> None:
    others, (one, other) = Others(), optimizers()
    with GuardedSteps(others, (), [one, other]):  # type: ignore[arg-type]
        for optimizer in (one, other, one, other):
            optimizer.step()
    assert others.together == ["the step of SGD"] * 2
    one.step()
    hooks = one._optimizer_step_pre_hooks, one._optimizer_step_post_hooks
    assert len(others.together) == 2 and not any(hooks), "after the block the optimizer is the user's again"


def test_a_step_that_ended_is_not_in_the_middle() -> None:
    others, (one,) = Others(), optimizers(1)
    steps = GuardedSteps(others, (), [one])  # type: ignore[arg-type]
    with steps:
        assert steps.where == "a guarded block"
        one.step()
        assert steps.where == "a guarded block, after the step of SGD"
    error = steps.failed(ValueError("later"))
    assert "this one has taken it" in error.__notes__[0]


def test_an_attempt_that_begins_with_a_step_meets_first(two: Simulation) -> None:
    """With a closure the forward comes after it."""
    scope, met = two.scopes[0], list[bool]()
    root: Any = SimpleNamespace(met_by_hand=lambda *, renewed: met.append(renewed))
    others = Others([scope])
    GuardedSteps(others, [root], []).come_together("the end")  # type: ignore[arg-type]
    assert not others.met
    scope.failures.must_meet = True
    steps = GuardedSteps(others, [root], [])  # type: ignore[arg-type]
    for _ in range(2):
        steps.come_together("the end")
    assert others.met == 1 and met == [True]


def test_what_a_step_wrote_is_seen() -> None:
    (one,) = optimizers(1)
    parameter = one.param_groups[0]["params"][0]
    seen = [guarded_steps._versions(one)]
    for write in (
        lambda: one.state[parameter].update(history=[]),
        lambda: one.state[parameter].update(step=0),
        lambda: one.state[parameter].update(step=1),
        lambda: one.state[parameter].update(exp_avg=torch.zeros(2)),
        lambda: one.state[parameter]["exp_avg"].add_(1),
        lambda: parameter.detach().add_(1),
    ):
        write()
        seen.append(guarded_steps._versions(one))
    assert len({str(versions) for versions in seen}) == len(seen)
    for how in ("foreach", "fused"):
        one.param_groups[0][how] = True
        assert guarded_steps._versions(one) is None
        one.param_groups[0][how] = False


class Event:
    """Of a device that never comes to it."""

    asked = 0

    def record(self, stream: object) -> None:
        pass

    def query(self) -> bool:
        Event.asked += 1
        assert Event.asked < 50, "the host waits for ever"
        return False


def test_the_host_does_not_wait_for_messages_of_connections_that_were_cut(
    two: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    scope = two.scopes[0]
    module = SimpleNamespace(Event=Event, current_stream=lambda device: None)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    scope.fail(fault(scope))
    with pytest.raises(PeerFailed):
        arrive([torch.device("meta")], [scope])
    # And what a backend ended by itself is over, too.
    ended: Any = two.groups[0]
    ended.check = lambda: (_ for _ in ()).throw(PeerFailed("the backend ended it", rank=1))
    with pytest.raises(PeerFailed, match="the backend ended it"):
        arrive([], [scope])
