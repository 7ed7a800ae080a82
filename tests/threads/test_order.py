"""Ranks that are about to send different things: found before anything of it is sent, with the module and the ranks.

Ranks that are threads wait for each other in collectives that nothing ends. So in tests of what differs all of them ask
before every message here, and all raise. Ranks that deviate while the others go on unasked are the matter of
tests/procs/test_order_gloo.py.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullshard import full_params, fully_shard
from fullshard.agree.ledger import Order, program_of
from fullshard.engine import unit_of
from fullshard.peers import RanksDisagree, Scope, scope_of
from tests.harness.behaviours import behaviour
from tests.harness.models import seeded
from tests.harness.threads import WORLD, run_ranks


class Stack(nn.Module):
    """Four equal layers, which run in the order of `route`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor, route: tuple[int, ...] = (0, 1, 2, 3)) -> Tensor:
        for index in route:
            x = x + torch.tanh(self.layers[index](x))
        result: Tensor = self.head(x)
        return result


def stack(**arguments: Any) -> Any:
    model: Any = seeded(Stack)
    for layer in model.layers:
        fully_shard(layer, **arguments)
    return fully_shard(model, **arguments)


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + rank))


class Training:
    """A model and its optimizer on one rank, and what may be done with them."""

    def __init__(self, rank: int, **arguments: Any) -> None:
        self.rank, self.steps = rank, 0
        self.model = stack(**arguments)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def forward(self, *route: int) -> Tensor:
        result: Tensor = self.model(batch(self.rank, self.steps), route or (0, 1, 2, 3))
        return result

    def backward(self, *route: int, sync: bool = True) -> None:
        self.model.set_requires_gradient_sync(sync)
        self.forward(*route).square().sum().backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def step(self, *route: int) -> None:
        self.backward(*route)
        self.update()

    def evaluate(self, batches: int, *route: int) -> None:
        with torch.no_grad():
            for _ in range(batches):
                self.forward(*route)


# ---- programs in which one rank (`odd`) does something else: what, and what the error says ----


def another_order(t: Training, odd: bool) -> None:
    t.step(0, 2, 1, 3) if odd else t.step()


def skipped_unit(t: Training, odd: bool) -> None:
    t.step(0, 1, 3) if odd else t.step()


def more_micro_batches(t: Training, odd: bool) -> None:
    for _ in range(3 if odd else 2):
        t.backward()
    t.update()
    t.step()


def more_micro_batches_without_sync(t: Training, odd: bool) -> None:
    for _ in range(3 if odd else 2):
        t.backward(sync=False)
    t.step()


def step_on_one_rank(t: Training, odd: bool) -> None:
    t.backward()
    if odd:
        t.update()
    t.step()


def more_evaluation(t: Training, odd: bool) -> None:
    t.evaluate(3 if odd else 2)
    t.step()


def loss_that_reaches_less(t: Training, odd: bool) -> None:
    inner: list[Tensor] = []
    t.model.layers[0].register_forward_hook(lambda _module, _args, output: inner.append(output))
    outer = t.forward()
    (inner[0] if odd else outer).square().sum().backward()


def less_is_trained(t: Training, odd: bool) -> None:
    t.step()
    if odd:
        t.model.layers[2].bias.requires_grad_(False)
    t.step()


def other_dtype(t: Training, odd: bool) -> None:
    t.step()
    if odd:
        t.model.layers[1].to(torch.bfloat16)
    t.evaluate(1)


def gradients_left_standing(t: Training, odd: bool) -> None:
    t.backward()
    t.optimizer.step()
    if not odd:
        t.optimizer.zero_grad()
    t.step()


def gradients_of_one_unit_taken_away(t: Training, odd: bool) -> None:
    t.backward()
    if odd:
        t.model.layers[2].zero_grad()
    t.backward()


def full_params_on_one_rank(t: Training, odd: bool) -> None:
    t.step()
    if odd:
        with full_params(t.model.layers[1]):
            pass
    t.evaluate(1)


DIVERGENCES: dict[Callable[[Training, bool], None], tuple[str, str]] = {
    another_order: ("layers.2: expected all ranks to gather", "make all ranks run the same modules"),
    skipped_unit: ("layers.3: expected all ranks to gather", "make all ranks run the same modules"),
    more_micro_batches: ("root: expected all ranks to gather", "call optimizer.step() on all ranks alike"),
    more_micro_batches_without_sync: ("layers.1: expected all ranks to", "as many forwards and backwards"),
    step_on_one_rank: ("root: expected all ranks to gather", "call optimizer.step() on all ranks alike"),
    more_evaluation: ("root: expected all ranks to gather", "as many evaluation batches"),
    loss_that_reaches_less: ("layers.0: expected all ranks to gather", "make all ranks run the same modules"),
    less_is_trained: ("layers.2: expected all ranks to reduce", "the same dtype, requires_grad"),
    other_dtype: ("layers.1: expected all ranks to gather", "the same dtype, requires_grad"),
    full_params_on_one_rank: ("root: expected all ranks to gather", "enter it on all ranks"),
    gradients_left_standing: ("layers.3: expected all ranks to reduce", "call zero_grad() on all ranks alike"),
    gradients_of_one_unit_taken_away: ("layers.2: expected all ranks to reduce", "call zero_grad() on all ranks alike"),
}


@pytest.mark.sample(4)
@behaviour(
    "a rank about to send something else is found before it does, with the module and the ranks: {what}",
    area="failures",
    torch="none",
    reason="torch mixes messages of equal sizes, aborts where sizes differ, or hangs",
)
@pytest.mark.parametrize("what", [diverge.__name__.replace("_", " ") for diverge in DIVERGENCES])
@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_does_something_else_is_named(world: int, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is the odd one; all ranks raise the same error."""
    ask_always(monkeypatch)
    (diverge,) = (diverge for diverge in DIVERGENCES if diverge.__name__.replace("_", " ") == what)

    def rank_main(rank: int) -> str:
        training = Training(rank)
        with pytest.raises(RanksDisagree) as caught:
            diverge(training, rank == 1)
        assert set(caught.value.by_rank) == set(range(world)) and caught.value.what == "order"
        return str(caught.value)

    texts = run_ranks(world, rank_main)
    begins, advises = DIVERGENCES[diverge]
    assert len(set(texts)) == 1
    print(texts[0])
    assert advises in texts[0]
    others = "rank 0" if world == 2 else "ranks 0 and 2"
    assert f"({others})" in texts[0] and "found rank 1 about to" in texts[0] or world == 2
    if world == 3:
        assert texts[0].startswith(begins)


class TwoOfASize(nn.Module):
    """A unit of two parameters of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.ones(6)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.first * self.second


def test_gradients_of_equal_sizes_are_not_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second step on each rank trains another one of two parameters: the messages have equal sizes."""
    ask_always(monkeypatch)

    def rank_main(rank: int) -> str:
        model: Any = fully_shard(TwoOfASize())
        for step in range(2):
            if step:
                (model.second if rank else model.first).requires_grad_(False)
                with pytest.raises(RanksDisagree) as caught:
                    model(torch.ones(2, 6)).sum().backward()
                return str(caught.value)
            model(torch.ones(2, 6)).sum().backward()
        raise AssertionError

    texts = run_ranks(2, rank_main)
    assert texts[0] == texts[1] and "float32*3@0" in texts[0] and "float32*3@1" in texts[0]
    assert texts[0].endswith(
        "give the parameters of this module the same dtype, requires_grad and settings on all ranks"
    )


def ask_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Order, "follows", lambda self, action, doubts=True: False)


class Asked:
    """Counts the questions of this thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._counts = counts = threading.local()
        agree = Scope.agree

        def counted(scope: Scope, what: str, value: str, **options: bool) -> dict[int, str] | None:
            counts.value = self.count + (what == "order")
            return agree(scope, what, value, **options)

        monkeypatch.setattr(Scope, "agree", counted)

    @property
    def count(self) -> int:
        return getattr(self._counts, "value", 0)


def _usual(training: Training) -> None:
    training.backward(sync=False)
    training.step()


def test_a_steady_state_asks_nothing_and_off_asks_never(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)

    def rank_main(rank: int) -> list[int]:
        training = Training(rank)
        counts = [asked.count]
        for _ in range(5):
            _usual(training)
            counts.append(asked.count)
        return counts

    for counts in run_ranks(WORLD, rank_main):
        # The first step asks before each of its messages, and the second once: what follows a step.
        assert 0 < counts[1] - counts[0] <= 36 and counts[2] - counts[1] <= 2 or WORLD == 1
        assert counts[2] == counts[-1]

    def accumulates(rank: int) -> list[int]:
        """Gradients are added to others in the second backward of a step, and in the end for good."""
        training = Training(rank)
        counts = []
        for step in range(9):
            for _ in range(2):
                training.backward()
            training.optimizer.step()
            if step < 5:
                training.optimizer.zero_grad(set_to_none=step % 2 == 0)
            counts.append(asked.count)
        return counts

    for counts in run_ranks(WORLD, accumulates):
        # A step that finds gradients of the one before is another one, once.
        assert counts[4] - counts[2] <= 4 and counts[-1] == counts[-2]
    monkeypatch.setenv("FULLSHARD_GUARD", "off")
    assert all(counts[-1] == counts[0] for counts in run_ranks(WORLD, rank_main))


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("FULLSHARD_GUARD", "hope", "FULLSHARD_GUARD: expected one of full, structure, off, found 'hope'"),
        ("FULLSHARD_SILENCE", "-1", "FULLSHARD_SILENCE: expected a number of seconds >= 0, found '-1'"),
        ("FULLSHARD_GAURD", "off", "FULLSHARD_GAURD: expected one of fullshard's variables, .*FULLSHARD_GUARD"),
    ],
)
def test_settings_of_the_guard(name: str, value: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nobody is to be asked: what a user wrote is to be right."""
    monkeypatch.setenv(name, value)

    def rank_main(rank: int) -> None:
        with pytest.raises(ValueError, match=text):
            Training(rank).step()

    run_ranks(WORLD, rank_main)
    if WORLD == 2:
        run_ranks(1, rank_main)


def test_an_order_goes_with_its_scope() -> None:
    """It is kept by a weak reference to the scope, so it must not lead to it."""

    def rank_main(rank: int) -> None:
        Training(rank).step()
        scope = scope_of(range(2))
        assert scope is not None
        pending, seen = [program_of(scope)], set()
        while pending:
            found = pending.pop()
            assert not isinstance(found, Scope)
            if id(found) not in seen and not isinstance(found, type | ModuleType | FunctionType):
                seen.add(id(found))
                pending += gc.get_referents(found)
        assert len(seen) > 50

    run_ranks(2, rank_main)


# ---- what is right although ranks differ ----


def test_an_optimizer_of_something_else_may_step_on_one_rank() -> None:
    def rank_main(rank: int) -> None:
        training = Training(rank)
        probe = nn.Linear(2, 2)
        other = torch.optim.SGD(probe.parameters(), lr=0.1)
        for _ in range(3):
            training.step()
            if rank == 0:
                probe(torch.randn(1, 2)).sum().backward()
                other.step()

    run_ranks(WORLD, rank_main)


def test_scopes_may_differ() -> None:
    """Two pipeline stages, as it were: pairs of ranks run their own models in their own ways."""
    from torch.distributed.device_mesh import init_device_mesh

    def rank_main(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        training = Training(rank, mesh=mesh["dp"])
        for _ in range(3):
            if rank < 2:
                training.step(0, 2, 1)
            else:
                training.evaluate(2)
                training.backward()
                training.step()

    run_ranks(4, rank_main)


def test_replicated_ranks_agree_with_those_that_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """HSDP: one order for all ranks of the mesh, so a rank of another replica is named, too."""
    ask_always(monkeypatch)
    from torch.distributed.device_mesh import init_device_mesh

    def rank_main(rank: int) -> str:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        training = Training(rank, mesh=mesh)
        for _ in range(2):
            training.step()
        with pytest.raises(RanksDisagree) as caught:
            training.evaluate(1) if rank == 3 else training.backward(1, 0)
        return str(caught.value)

    texts = run_ranks(4, rank_main)
    assert len(set(texts)) == 1 and "rank 3 about to gather" in texts[0] and "ranks 0, 1 and 2" in texts[0]


def test_alone_or_replicated_by_itself_a_rank_may_evaluate_as_it_likes() -> None:
    """Where nothing is sent nothing is compared."""
    from torch.distributed.device_mesh import init_device_mesh

    def rank_main(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        training = Training(rank, mesh=mesh)
        for _ in range(2):
            training.step()
            training.evaluate(2 if rank == 0 else 0)

    run_ranks(2, rank_main)


def test_what_is_full_already_a_rank_may_evaluate_by_itself() -> None:
    """Between forward and backward, where nothing is freed after forward: its peers hear nothing of it."""

    def rank_main(rank: int) -> None:
        training = Training(rank, reshard_after_forward=False)
        for step in range(4):
            loss = training.forward().square().sum()
            training.evaluate(rank * step)
            loss.backward()
            training.update()
            training.evaluate(1)

    run_ranks(WORLD, rank_main)


def test_an_evaluation_that_sends_nothing_may_fail_on_one_rank() -> None:
    """Replicas that are nowhere cut: the others train on, and nobody waits for the one that caught it."""
    from torch.distributed.device_mesh import init_device_mesh

    def rank_main(rank: int) -> int:
        training = Training(rank, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
        for step in range(3):
            if rank and step:
                with pytest.raises(IndexError):
                    training.evaluate(1, 9)
            training.step()
        scope = scope_of(range(2))
        assert scope is not None
        return scope.epoch

    assert run_ranks(2, rank_main) == [0, 0]


def test_a_step_that_only_makes_the_state_of_an_optimizer_is_none() -> None:
    """torch takes one, with a rate of zero, where it loads a state into an optimizer that has none."""

    def ranks(rank: int) -> None:
        training = Training(rank)
        for step in range(3):
            training.backward()
            training.update()
            if rank and step == 1:
                for lr in (0.0, torch.tensor(0.0)):
                    training.optimizer.param_groups[0]["lr"] = lr
                    training.optimizer.step()
                training.optimizer.param_groups[0]["lr"] = 0.1

    run_ranks(2, ranks)


def test_a_step_counts_once_however_many_roots_tell_of_it() -> None:
    """`unshard` before the first forward makes a root that gives way to another, and may exist for a while."""

    def ranks(rank: int) -> None:
        training = Training(rank)
        kept = []
        for part in (training.model.layers[0], training.model):
            part.unshard()
            if rank:
                kept.append(unit_of(part).root)
        for _ in range(3):
            training.backward()
            training.update()

    run_ranks(2, ranks)
