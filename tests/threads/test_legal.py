"""Zero false alarms, a slice of `python -m tests.harness.legal`; and what it has found, by name."""

from __future__ import annotations

import copy
import gc
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fullshard import fully_shard
from tests.harness import collecting, legal, legal_programs, threads
from tests.harness.legal_programs import AFTER, BEFORE, OPTIMIZERS, SETTINGS, STRATEGIES, WINDOWS, Program, generate
from tests.harness.parity import environment
from tests.harness.random_models import BlockSpec, LeafSpec, ModelSpec
from tests.harness.threads import run_ranks
from tests.threads.programs import WIDTH, Block, Model, batch, compare_gradients, part, shard


def test_legal_programs_raise_nothing_and_warn_of_nothing() -> None:
    found = legal.count(range(40, 48))
    assert not found.alarms, "\n".join(f"program {alarm.seed}: {alarm.text}" for alarm in found.alarms)
    assert found.programs == 8


@pytest.mark.slow
@pytest.mark.hang_after(300)
def test_some_legal_programs_have_all_that_the_thousands_have() -> None:
    """Of all that the thousands have there is something in the slice."""
    found = legal.count(range(40, 90))
    assert not found.alarms, "\n".join(f"program {alarm.seed}: {alarm.text}" for alarm in found.alarms)
    assert found.programs == 50
    wanted = {f"step: {name}" for name in (*BEFORE, *WINDOWS, *AFTER)} | {f"setting: {name}" for name in SETTINGS}
    wanted |= {f"strategy: {name}" for name in STRATEGIES} | {f"optimizer: {name}" for name in OPTIMIZERS}
    assert wanted <= found.of.keys(), wanted - found.of.keys()


@pytest.mark.slow
@pytest.mark.sample(full=1)
@pytest.mark.hang_after(1800)
@pytest.mark.parametrize("tenth", range(10))
def test_hundreds_of_legal_programs(tenth: int) -> None:
    """All that `python -m tests.harness.legal` runs."""
    count = legal.COUNT // 10
    assert legal.main(["--count", str(count), "--first", str(tenth * count), "--jobs", "2"]) == 0


@pytest.mark.slow
@pytest.mark.sample(full=1)
@pytest.mark.hang_after(1800)
@pytest.mark.parametrize("tenth", range(10))
def test_legal_programs_over_gloo(tenth: int) -> None:
    """All that `python -m tests.harness.legal --ranks=gloo` runs."""
    assert legal.main(["--count", "20", "--first", str(5000 + tenth * 20), "--ranks", "gloo"]) == 0


SMALL = Program(
    0, "one model", 2, ModelSpec((BlockSpec((LeafSpec("dense"),)),), width=3), "default", "SGD", (("plain",),)
)


def test_an_alarm_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception, a warning and a record of the log: what says nothing when it should is no proof."""

    def raises(run: Any) -> None:
        raise RuntimeError("refused")

    def warns(run: Any) -> None:
        import logging
        import warnings

        if run.rank == 0:
            warnings.warn("looks odd", stacklevel=1)
            logging.getLogger("fullshard.engine").warning("looks strange")
        WINDOWS["early exit"](run)

    assert legal.alarms_of(SMALL) == []
    monkeypatch.setitem(legal_programs.WINDOWS, "plain", raises)
    (alarm,) = legal.alarms_of(SMALL)
    assert "refused" in alarm.text and alarm.seed == 0
    monkeypatch.setitem(legal_programs.WINDOWS, "plain", warns)
    assert [alarm.text.partition(" (")[0] for alarm in legal.alarms_of(SMALL)] == [
        "UserWarning: looks odd",
        "log: WARNING: looks strange",
    ]


def test_a_number_is_a_program() -> None:
    """The same one in every process; and different ones for different numbers."""
    state = random.getstate()
    programs = [generate(seed) for seed in range(100)]
    assert random.getstate() == state and programs == [generate(seed) for seed in range(100)]
    assert len({repr(replace(program, seed=0)) for program in programs}) == 100


# ---- what was found ------------------------------------------------------------------------------------------


def _mean_square(model: Any, tokens: Tensor) -> Tensor:
    return model(tokens).pow(2).mean()


class Reentrant(Model):
    def call(self, layer: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(layer, x, use_reentrant=True)


def _beside_plain(rank: int, base: nn.Module, loss: Callable[[Any, Tensor, int], Tensor], world: int) -> None:
    reference = copy.deepcopy(base)
    model = shard(copy.deepcopy(base))
    for step in range(3):
        tokens = batch(world, step)
        loss(model, part(tokens, rank), rank + step).backward()
        (sum(loss(reference, part(tokens, r), r + step) for r in range(world)) / world).backward()
        compare_gradients(model, reference, step)
        model.zero_grad()
        reference.zero_grad()


@pytest.mark.sample(2)
@pytest.mark.parametrize("frozen", ["", "up.weight", "down.weight", "norm.weight"])
def test_two_forwards_of_recomputed_units_and_one_backward(frozen: str) -> None:
    """Re-entrant recomputation brings the gradients of each use by themselves: those of the first one are not to be
    taken for those of the second, whose weights were freed too early then."""

    def loss(model: Any, tokens: Tensor, _turn: int) -> Tensor:
        return _mean_square(model, tokens) + (model(tokens) * model(tokens.flip(1))).mean()

    torch.manual_seed(0)
    base = Reentrant()
    if frozen:
        for layer in base.layers:
            layer.get_parameter(frozen).requires_grad_(False)
    with environment({"FULLSHARD_CHECK": "1"}):
        run_ranks(2, _beside_plain, base, loss, 2)


class Skipping(Block):
    """Returns its input where it is told to."""

    skips = False

    def forward(self, x: Tensor) -> Tensor:
        return x if self.skips else super().forward(x)


class SkippingModel(Model):
    block = Skipping


@pytest.mark.sample(2)
@pytest.mark.parametrize("skipped", [(0,), (2,), (0, 1), (1, 2), (0, 1, 2)])
def test_units_that_return_their_input_on_one_rank(skipped: tuple[int, ...]) -> None:
    """An autograd node made the outputs of two units then: it tells of both, in the order in which other ranks are
    told."""

    def loss(model: Any, tokens: Tensor, turn: int) -> Tensor:
        for i in skipped:
            model.layers[i].skips = turn % 2 == 0
        first = model(tokens)
        for i in skipped:
            model.layers[i].skips = turn % 3 == 0
        return (first - model(tokens.flip(1))).pow(2).mean()

    torch.manual_seed(0)
    with environment({"FULLSHARD_CHECK": "1"}):
        run_ranks(2, _beside_plain, SkippingModel(), loss, 2)


def test_units_that_are_recomputed_and_return_their_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit in a checkpoint returned its input, the output of a unit outside that some ranks skip: recomputed, it took
    the backward of that one for the beginning of its own, and was gathered there by some ranks alone."""
    monkeypatch.setattr(legal, "SECONDS", 10.0)
    inner = BlockSpec((LeafSpec("twins", 2, "never", unit=True), LeafSpec("twins", 5)), recompute="outside")
    outer = BlockSpec((LeafSpec("norm", use="by_rank"),), inner)
    spec = ModelSpec((outer, BlockSpec((LeafSpec("twins"),))), width=7)
    program = Program(486, "one model", 2, spec, "resharded", "SGD", (("another order",), ("another order",)))
    assert legal.alarms_of(program) == []


def test_ranks_that_differ_in_what_has_no_value() -> None:
    """One rank has values, the other memory that `to_empty` made: both look, or none does."""

    def rank_main(rank: int) -> None:
        model = nn.Sequential(nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH))
        fully_shard(model[0])
        fully_shard(model)
        if rank:
            model.to_empty(device="cpu")
        for p in model.parameters():
            nn.init.constant_(p, 0.5)
        model(torch.ones(2, WIDTH)).sum().backward()

    run_ranks(2, rank_main)


def test_ranks_that_differ_in_what_has_no_value_are_told_alike() -> None:
    """And where nobody wrote the one's memory, all raise."""

    def rank_main(rank: int) -> None:
        model: Any = fully_shard(nn.Linear(WIDTH, 1, bias=False))
        if rank == 0:  # who owns the only row
            model.to_empty(device="cpu")
        with pytest.raises(RuntimeError, match="found memory that nothing was written to since to_empty .*: weight"):
            model(torch.ones(2, WIDTH))

    run_ranks(2, rank_main)


# ---- while garbage is collected at random --------------------------------------------------------------------

# Each thing that legal programs do comes in some program of any thirty.
PROGRAMS = range(200, 230)
FEW = PROGRAMS[:6]


@pytest.mark.slow
@pytest.mark.hang_after(300)
@pytest.mark.parametrize(
    "programs", [FEW, pytest.param(PROGRAMS, marks=pytest.mark.slow)], ids=lambda programs: str(len(programs))
)
def test_legal_programs_while_garbage_is_collected_at_random(programs: range) -> None:
    before, found = collecting.collections, []
    for seed in programs:
        with collecting.at_random(seed):
            found.append(legal.count([seed]))
    assert not (alarms := [alarm for one in found for alarm in one.alarms]), "\n".join(
        f"program {alarm.seed}: {alarm.text}" for alarm in alarms
    )
    if programs is PROGRAMS:
        assert {f"step: {name}" for name in (*BEFORE, *WINDOWS, *AFTER)} <= {name for one in found for name in one.of}
    if threads.RANKS == "threads":
        assert collecting.collections - before > 5 * len(programs)


@pytest.mark.slow
@pytest.mark.hang_after(300)
def test_the_same_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each rank has a collector of its own."""
    monkeypatch.setattr(threads, "RANKS", "gloo")
    for seed in FEW[:4]:
        with collecting.at_random(seed):
            alarms = legal.count([seed]).alarms
        assert not alarms, "\n".join(f"program {alarm.seed}: {alarm.text}" for alarm in alarms)


@pytest.mark.threads_only(reason="what is counted here is this process's collections")
def test_the_points_are_those_of_the_seed_and_differ_between_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """And afterwards nothing is left: no profile function, the automatic collector on."""
    monkeypatch.setattr(collecting, "MEAN_CALLS", 50)

    def called(number: int) -> int:
        return number

    def points(rank: int) -> list[int]:
        assert not gc.isenabled()
        profile, seen = sys.getprofile(), []
        if isinstance(profile, collecting._Collector):
            for number in range(1000):
                left = profile.left
                called(number)
                if profile.left > left:
                    seen.append(number)
        dist.barrier()
        return seen

    runs = []
    for seed in (1, 1, 2):
        with collecting.at_random(seed):
            runs.append(run_ranks(8, points))
    assert runs[0] == runs[1] != runs[2]
    some = [tuple(points) for points in runs[0] if points]
    assert 1 < len(some) < 8 and len(set(some)) == len(some)
    assert gc.isenabled() and sys.getprofile() is None and not collecting.seed_of_run() and gc.get_freeze_count() == 0


def test_without_the_mode_nothing_is_collected_by_it() -> None:
    before = collecting.collections

    def rank_main(rank: int) -> bool:
        return gc.isenabled() and not isinstance(sys.getprofile(), collecting._Collector)

    if not collecting.seed_of_run():
        assert all(run_ranks(2, rank_main)) and collecting.collections == before
