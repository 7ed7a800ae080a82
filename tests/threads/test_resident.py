"""Memory that stays: units that are gathered less often, by the bytes that were given; storage at one address."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fullshard
from fullshard import MixedPrecisionPolicy, fully_shard, report
from fullshard.engine import unit_of
from fullshard.observe import record
from fullshard.policy import use_options
from tests.harness.behaviours import behaviour
from tests.harness.fake import fake_world
from tests.harness.implementations import FULLSHARD, Implementation, for_each_implementation, probes, sharded
from tests.harness.models import BY_NAME, adamw, assert_same_training, collect, seeded, train_reference
from tests.harness.parity import train_beside_oracle
from tests.harness.random_models import EXPLORING, ModelSpec, examples, model_specs
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.hang_after(7200 if EXPLORING else 120)
WIDTH = 8
# Of one layer's full weight in float32; rows divide by the ranks and by the alignment.
LAYER = WIDTH * WIDTH * 4


def _layers(count: int, frozen: tuple[int, ...] = (), policy: MixedPrecisionPolicy | None = None) -> Any:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))
    for i, layer in enumerate(model):
        # The ranks of a test may be threads, which share one random state.
        layer.weight.data.copy_(torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH).roll(i) / 2)
        layer.requires_grad_(i not in frozen)
        fully_shard(layer, mp_policy=policy or MixedPrecisionPolicy())
    return fully_shard(model, mp_policy=policy or MixedPrecisionPolicy())


def _live(model: Any) -> dict[str, int]:
    return {unit.name: unit.full_nbytes_live for unit in report(model).units if unit.full_nbytes_live}


def _gathers(model: Any, run: Callable[[], object]) -> list[str]:
    with record(model) as trace:
        run()
    return [unit for kind, unit in trace.commands if kind == "unshard"]


def _step(model: Any) -> None:
    model(torch.ones(2, WIDTH, requires_grad=True)).float().sum().backward()


def test_what_fits_is_chosen_and_no_more_is_held() -> None:
    """The last layers first; counted between forward and backward, and after the step."""
    with fake_world(4):
        for budget in (0, LAYER - 1, LAYER, 2 * LAYER + 5, 99 * LAYER):
            model = _layers(4)
            kept = model.set_memory_budget(resident=budget).resident
            assert kept == ("0", "1", "2", "3")[4 - min(4, budget // LAYER) :]
            for _ in range(2):
                loss = model(torch.ones(2, WIDTH)).sum()
                assert _live(model) == dict.fromkeys(kept, LAYER)
                assert sum(_live(model).values()) <= budget
                loss.backward()
                assert _live(model) == {}


def test_frozen_ones_are_chosen_first_and_stay() -> None:
    """Of two layers that fit one is the frozen one, which is gathered once for many steps; the budget holds always."""
    with fake_world(4):
        model = _layers(4, frozen=(1,))
        assert model.set_memory_budget(resident=2 * LAYER).resident == ("1", "3")
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        gathered = []
        for _ in range(3):
            gathered.append(_gathers(model, lambda: _step(model)))
            assert _live(model) == {"1": LAYER}
            assert all(isinstance(p, DTensor) for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        assert sorted(gathered[0]) == ["0", "0", "1", "2", "2", "3"]
        assert sorted(gathered[1]) == sorted(gathered[2]) == ["0", "0", "2", "2", "3"]
        with torch.no_grad():
            assert "1" not in _gathers(model, lambda: model(torch.ones(2, WIDTH)))
        assert sum(_live(model).values()) <= 2 * LAYER
        model.set_memory_budget(resident=0)
        assert _live(model) == {}


@pytest.mark.slow
@behaviour(
    "`set_memory_budget(resident=)` keeps what fits full, and training is the same",
    area="when parameters are full",
    torch="none",
    reason="not in torch; the alternative there is reshard_after_forward for each module",
)
@examples(4, 50)
@given(spec=model_specs(), world=st.integers(2, 3), nbytes=st.sampled_from([64, 400, 1 << 20]))
def test_any_model_trains_as_without(spec: ModelSpec, world: int, nbytes: int) -> None:
    """The choice is made anew before each step, with other bytes."""

    def disturb(model: Any, step: int, rank: int) -> None:
        model.set_memory_budget(resident=nbytes if step != 1 else nbytes // 2)

    def train(rank: int) -> None:
        # What is frozen and kept is still there behind the last step: given back before memory is looked at.
        train_beside_oracle(rank, spec, world, 3, disturb=disturb, lasting=True)

    with use_options(**spec.options()):
        run_ranks(world, train, timeout=60.0)


EDITS: dict[str, Callable[[Any], object]] = {
    "in place": lambda p: p.mul_(2),
    "in place of the shard": lambda p: p.to_local().mul_(2),
    "copied": lambda p: p.copy_(p * 2),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_edits_of_frozen_parameters_are_seen(edit: str, world: int) -> None:
    """The next forward computes with what was written: twice the weights of one layer, twice the output."""

    def rank_main(rank: int) -> None:
        model = _layers(2, frozen=(0,))
        assert model.set_memory_budget(resident=LAYER).resident == ("0",)
        x = torch.ones(2, WIDTH)
        before = model(x).detach()
        assert _gathers(model, lambda: model(x)).count("0") == 0
        with torch.no_grad():
            EDITS[edit](model[0].weight)
        assert torch.equal(model(x), 2 * before)

    run_ranks(world, rank_main)


def test_loading_and_late_gradients_are_seen() -> None:
    """A state dict; and an optimizer that writes a parameter which was frozen with a gradient still on it."""

    def rank_main(rank: int) -> None:
        x = torch.ones(2, WIDTH)
        model = _layers(2, frozen=(0,))
        model.set_memory_budget(resident=LAYER)
        before = model(x).detach()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        state["0.weight"].mul_(2)
        model.load_state_dict(state)
        assert torch.equal(model(x), 2 * before)

        model, plain = _layers(2), _layers(2)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.5, foreach=True) for m in (model, plain)]
        for m in (model, plain):
            m(x).sum().backward()
            m[0].requires_grad_(False)
        assert model.set_memory_budget(resident=LAYER).resident == ("0",)
        for _ in range(2):
            assert torch.equal(model(x), plain(x))
            for optimizer in optimizers:
                optimizer.step()  # the gradient of the frozen layer is still there
        assert torch.equal(model(x), plain(x))

    run_ranks(2, rank_main)


def test_mixed_precision_and_replicas_count_the_compute_dtype() -> None:
    with fake_world(4):
        model = _layers(3, policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        assert model.set_memory_budget(resident=LAYER).resident == ("1", "2")
        loss = model(torch.ones(2, WIDTH)).float().sum()
        assert sum(_live(model).values()) == LAYER
        loss.backward()
        assert _live(model) == {}


def test_units_that_stay_full_anyway_are_no_choice() -> None:
    """The root, and `reshard_after_forward=False`; and in a world of one nothing is there to be kept."""
    with fake_world(2):
        model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
        fully_shard(model[0], reshard_after_forward=False)
        fully_shard(model[1])
        fully_shard(model)
        for _ in range(2):
            assert model.set_memory_budget(resident=99 * LAYER).resident == ("1",)
            _step(model)
    with fake_world(1):
        assert _layers(2).set_memory_budget(resident=99 * LAYER).resident == ()


def test_the_report_shows_the_choice() -> None:
    """And its expected peak counts what is kept, also behind the backward."""
    with fake_world(4):
        model = _layers(6, frozen=(0,))
        _step(model)
        model.zero_grad()
        _step(model)
        before = report(model)
        model.set_memory_budget(resident=2 * LAYER)
        after = report(model)
        assert [unit.resident for unit in after.units] == [False, True, False, False, False, False, True]
        assert "kept full within set_memory_budget(resident): 0, 5" in str(after)
        assert "set_memory_budget" not in str(before)
        terms = {term.name: term.nbytes for term in after.peak_terms}
        assert terms["full 0 (kept)"] == LAYER
        assert before.peak_nbytes < after.peak_nbytes <= before.peak_nbytes + 2 * LAYER


@pytest.mark.sample(4)
@pytest.mark.parametrize("nbytes", [-1, 0.5, "1", True])
@pytest.mark.parametrize("budget", ["prefetch", "gradients", "resident"])
def test_bytes_are_whole_numbers(budget: str, nbytes: Any) -> None:
    """A call with one that is not changes none of the others."""
    with fake_world(2):
        model = _layers(1)
        before = model.set_memory_budget(prefetch=1, gradients=2, resident=LAYER)
        others = {"prefetch": 10, "gradients": 20, "resident": 0}
        with pytest.raises(ValueError, match=f"{budget}: expected a whole number of bytes >= 0"):
            model.set_memory_budget(**others | {budget: nbytes})
        assert model.set_memory_budget() == before == (1, 2, ("0",))


def test_budgets_that_are_left_out_stay_and_none_is_the_default() -> None:
    with fake_world(2):
        model = _layers(3)
        assert model.set_memory_budget() == (None, None, ())
        assert model.set_memory_budget(prefetch=5, resident=LAYER) == (5, None, ("2",))
        _step(model)
        root = unit_of(model).root  # type: ignore[union-attr]
        assert root is not None and (root.run.prefetch_nbytes, root.executor.waiting.limit) == (5, None)
        assert model.set_memory_budget(gradients=7) == (5, 7, ("2",))
        assert (root.run.prefetch_nbytes, root.executor.waiting.limit) == (5, 7)
        assert model.set_memory_budget(prefetch=None, resident=None) == (None, 7, ())
        assert (root.run.prefetch_nbytes, root.executor.waiting.limit) == (None, 7)
        _step(model)


def test_below_the_root_units_are_kept_and_nothing_is_limited() -> None:
    """The two limits of a root are refused there, before anything changes; what is returned is what the root holds."""
    with fake_world(2):
        model = _layers(3)
        model.set_memory_budget(gradients=7)
        _step(model)
        for limits in ({"prefetch": 1}, {"gradients": 1}, {"prefetch": 1, "gradients": 1}):
            with pytest.raises(RuntimeError, match=rf"\({', '.join(limits)}\): .* found 1 below it; call it on"):
                model[1].set_memory_budget(**limits, resident=LAYER)
        assert model.set_memory_budget() == (None, 7, ())
        assert model[1].set_memory_budget(resident=LAYER) == (None, 7, ("",))
        assert model.set_memory_budget() == (None, 7, ("1",))


def test_a_failed_step_gives_everything_back() -> None:
    """What is kept is gathered again by the next step, whose gradients are those of a model that never failed."""

    def rank_main(rank: int) -> None:
        def gradients(fail: bool) -> list[Tensor]:
            model = _layers(3, frozen=(0,))
            model.set_memory_budget(resident=3 * LAYER)
            if fail:
                broken = torch.ones(2, WIDTH, requires_grad=True).clone()
                broken.register_hook(lambda _: (_ for _ in ()).throw(RuntimeError("broken")))
                with pytest.raises(RuntimeError, match="broken"):
                    model(broken).sum().backward()
            _step(model)
            assert dist.get_world_size() == 2
            return [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]

        for found, expected in zip(gradients(True), gradients(False), strict=True):
            assert torch.equal(found, expected)

    run_ranks(2, rank_main)


# ---- storage that stays --------------------------------------------------------------------------------------

STEPS = 4


def _places(model: nn.Module) -> list[int]:
    """The addresses of all full parameters, in forward; gathered by hand."""
    for module in model.modules():
        if hasattr(module, "unshard"):
            module.unshard()
    found = [p.data_ptr() for p in model.parameters()]
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    return found


@behaviour(
    "`set_keep_unsharded_storage`: full parameters stay at one address, with the values of plain training",
    area="when parameters are full",
    since="2.15",
)
@for_each_implementation
@pytest.mark.parametrize("reshard", [True, False])
def test_addresses_stay_and_values_are_those_of_plain_training(impl: Implementation, reshard: bool) -> None:
    """Other memory is taken in between, so that a freed storage would come back elsewhere."""
    case = BY_NAME["residual"]
    batches = [[case.batch(step, rank) for rank in range(2)] for step in range(STEPS)]
    expected = train_reference(case.build(), case.loss, batches)

    def rank_main(rank: int) -> Any:
        model: Any = case.shard(case.build(), impl.fully_shard, reshard_after_forward=reshard)
        model.set_keep_unsharded_storage(True)
        optimizer = adamw(model.parameters(), watched=False)
        places, others = [_places(model)], []
        for step in range(STEPS):
            case.loss(model, batches[step][rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
            others += [torch.empty_like(p.to_local()) for p in model.parameters()]
            places.append(_places(model))
        assert all(found == places[0] for found in places)
        return collect(model, optimizer)

    for trained in run_ranks(2, rank_main):
        assert_same_training(trained, expected)


def _live_nbytes(module: nn.Module) -> int:
    unit = unit_of(module)
    assert unit is not None
    return sum(group.memory.live_nbytes for group in unit.groups)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, {}),
        (2, {"reshard_after_forward": False}),
        (4, {"reshard_after_forward": 2}),
        (2, {"offload_policy": fullshard.CPUOffloadPolicy(pin_memory=False)}),
        (2, {"mp_policy": fullshard.MixedPrecisionPolicy(torch.bfloat16, torch.float32)}),
        (1, {"mp_policy": fullshard.MixedPrecisionPolicy(torch.bfloat16, torch.float32)}),
        (1, {}),
    ],
    ids=["plain", "kept", "part", "offload", "mixed", "one, mixed", "one"],
)
def test_bytes_stay_while_it_is_on_and_go_when_it_is_off(world: int, options: dict[str, Any]) -> None:
    """Bit for bit the values of a model without it. In a world of one with one dtype there is nothing to keep."""

    def rank_main(rank: int) -> None:
        results = []
        for keep in (False, True):
            model: Any = sharded(FULLSHARD, probes(), **options)
            model.set_keep_unsharded_storage(keep)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            for _ in range(3):
                model(torch.full((2, 5), rank + 1.0)).float().pow(2).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            nbytes = [_live_nbytes(module) for module in model]
            full = [unit_of(module).full_nbytes for module in model]  # type: ignore[union-attr]
            assert nbytes == (full if keep else [0] * len(nbytes))
            results.append([p.full_tensor() for p in model.parameters()])
            model.set_keep_unsharded_storage(False)
            assert [_live_nbytes(module) for module in model] == [0] * len(nbytes)
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))

    run_ranks(world, rank_main)


def test_it_is_set_of_one_module_or_all() -> None:
    def rank_main(rank: int) -> None:
        model: Any = sharded(FULLSHARD, probes())
        model[1].set_keep_unsharded_storage(True, recurse=False)
        model(torch.ones(2, 5)).sum().backward()
        assert [_live_nbytes(module) > 0 for module in model] == [False, True, False]
        text = str(report(model))
        assert "storage of full parameters kept (set_keep_unsharded_storage): 1" in text
        told = report(model)
        assert [unit.keeps_storage for unit in told.units if unit.name] == [False, True, False]
        # A full storage needs no bytes of the budget of prefetched gathers, but those of its message.
        plans = [unit_of(module).record.plan.gather_nbytes for module in model]  # type: ignore[union-attr]
        assert plans[1] < plans[0] == plans[2]

    run_ranks(2, rank_main)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_conversion_makes_other_storages_that_stay(device: str) -> None:
    """`to(dtype)` before training, and `to_empty` of a model from the meta device."""

    def rank_main(rank: int) -> None:
        with torch.device(device):
            model: Any = seeded(lambda: nn.Sequential(*(nn.Linear(5, 5) for _ in range(2))))
        for module in (*model, model):
            fully_shard(module)
        model.set_keep_unsharded_storage(True)
        if device == "meta":
            model.to_empty(device="cpu")
            for p in model.parameters():
                nn.init.ones_(p)
        else:
            model(torch.ones(2, 5)).sum().backward()
            model.to(torch.bfloat16)
        dtype = next(model.parameters()).dtype
        places = []
        for _ in range(2):
            places.append(_places(model))
            model(torch.ones(2, 5, dtype=dtype)).sum().backward()
        assert places[0] == places[1]
        assert all(_live_nbytes(module) == unit_of(module).full_nbytes for module in model)  # type: ignore[union-attr]

    run_ranks(2, rank_main)


def test_with_a_memory_budget() -> None:
    """Resident units and gathers within a budget; the values are those without."""

    def rank_main(rank: int) -> None:
        results = []
        for keep in (False, True):
            model: Any = sharded(FULLSHARD, probes())
            model.set_keep_unsharded_storage(keep)
            model.set_memory_budget(prefetch=1 << 10, gradients=1 << 10, resident=200)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            for _ in range(3):
                model(torch.full((2, 5), rank + 1.0)).pow(2).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            results.append([p.full_tensor() for p in model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))

    run_ranks(2, rank_main)
