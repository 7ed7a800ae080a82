"""Numbers: NaN and inf are found before any update, and what has to be equal is equal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from tests.faults.actions import poison
from tests.faults.cases import PLAIN, Case, Equal, Outcome, Raises, Setup, at
from tests.faults.deeds import numbers as do
from tests.faults.program import Run
from tests.harness.models import BY_NAME
from tests.threads.programs import PROGRAMS

NAN, INF = float("nan"), float("inf")
CHECKED = Setup(finite="raise")


def _found(*words: str) -> Raises:
    return Raises("FloatingPointError", ("finite", *words))


def _poisoned(name: str, does: str, parameter_name: str, value: float, rank: int, index: int = 0, **more: Any) -> Case:
    """One bad element in one rank's rows of one gradient: all ranks raise before the update, and name both."""
    words = (parameter_name.replace(".", r"\."), f"rank {rank}")
    setup = more.pop("setup", CHECKED)
    fault = at(1, "gradients", poison(parameter_name, value, index), rank=rank)
    return Case(f"numbers/{name}", does, _found(*words), (fault,), setup, **more)


BAD = (
    _poisoned("nan_first_row", "a NaN in rank 0's rows of a block's gradient", "layers.1.up.weight", NAN, 0, fast=True),
    _poisoned("nan_last_element", "a NaN in the last element of rank 1's rows", "layers.2.down.weight", NAN, 1, -1),
    _poisoned("inf_in_root", "an inf in rank 1's rows of the head", "head.bias", INF, 1),
    _poisoned("minus_inf", "a minus inf in rank 0's rows of the embedding", "embedding.weight", -INF, 0, 5),
    _poisoned(
        "nan_of_three", "a NaN on rank 2 of three", "layers.0.norm.weight", NAN, 2, setup=replace(CHECKED, world=3)
    ),
    _poisoned(
        "nan_on_a_mesh",
        "a NaN on rank 3 of a 2 x 2 mesh",
        "layers.1.up.weight",
        NAN,
        3,
        setup=replace(CHECKED, world=4, options=do.options(mesh=do.hsdp)),
    ),
    _poisoned(
        "nan_in_a_replica",
        "a NaN on rank 1 of a mesh that only replicates",
        "layers.1.up.weight",
        NAN,
        1,
        setup=replace(CHECKED, options=do.options(mesh=do.replicated)),
    ),
    _poisoned(
        "nan_bf16",
        "an inf on rank 1, computed in bfloat16",
        "layers.1.up.weight",
        INF,
        1,
        setup=replace(CHECKED, options=do.options(mp_policy=do.bf16)),
    ),
    _poisoned(
        "nan_offload",
        "a NaN on rank 1 with CPU offload",
        "layers.1.up.weight",
        NAN,
        1,
        setup=replace(CHECKED, options=do.options(offload_policy=do.offload)),
    ),
    _poisoned(
        "nan_tied",
        "a NaN on rank 0 in a tied parameter",
        "embedding.weight",
        NAN,
        0,
        setup=replace(CHECKED, model=PROGRAMS["tied_weights"].model),
    ),
    _poisoned(
        "nan_beside_frozen",
        "a NaN on rank 1 in a partly frozen model",
        "layers.0.down.weight",
        NAN,
        1,
        setup=replace(CHECKED, model=PROGRAMS["frozen"].model),
    ),
    _poisoned(
        "nan_behind_clipping",
        "a NaN on rank 1, gradients clipped",
        "layers.1.up.weight",
        NAN,
        1,
        setup=replace(CHECKED, micros=2),
    ),
    Case(
        "numbers/nan_batch",
        "rank 1's loss is NaN",
        _found("loss", "rank 1"),
        (at(1, "batch", do.bad_loss(NAN), rank=1),),
        replace(CHECKED, loss=do.factor),
        fast=True,
    ),
    Case(
        "numbers/inf_batch",
        "rank 1's loss is inf",
        _found("loss", "rank 1"),
        (at(1, "batch", do.bad_loss(INF), rank=1),),
        replace(CHECKED, loss=do.factor),
    ),
    Case(
        "numbers/nan_gradient_of_a_finite_loss",
        "rank 1's loss is finite and its gradient NaN",
        _found("gradient", r"rank \d"),
        (at(1, "batch", do.bad_loss(1.0), rank=1),),
        replace(CHECKED, loss=do.nan_hidden),
    ),
    Case(
        "numbers/nan_in_a_held_micro_batch",
        "the first of two micro-batches is NaN on rank 1, and held",
        _found(r"rank \d"),
        (at(1, "batch #0", do.bad_loss(NAN), rank=1),),
        replace(CHECKED, micros=2, hold=True, loss=do.factor),
    ),
    Case(
        "numbers/empty_mean",
        "rank 1 has an empty batch and a mean over it",
        _found("loss", "rank 1"),
        (at(1, "batch", do.empty, rank=1),),
        replace(CHECKED, loss=do.mean_of_empty),
    ),
    Case(
        "numbers/empty_sum",
        "rank 1 has an empty batch in each step, the loss is a sum",
        PLAIN,
        setup=Setup(loss=do.sum_of_empty),
    ),
    Case(
        "numbers/nan_parameter",
        "a row of rank 1's shard becomes NaN between steps",
        _found(r"loss|layers"),
        (at(1, "step", do.bad_parameter, rank=1),),
        CHECKED,
    ),
    Case(
        "numbers/overflow",
        "rank 1's loss overflows in float32",
        _found("loss", "rank 1"),
        setup=replace(CHECKED, loss=do.ten),
    ),
    Case(
        "numbers/skipped",
        "a step with a NaN on rank 1 is skipped by all: bitwise as if it had not been",
        Equal(),
        (at(1, "step", do.skipped_step),),
        also=Raises("FloatingPointError", ("finite",)),
        fast=True,
    ),
    Case(
        "numbers/counted",
        "a bad element is counted, repaired by the program, and trained on",
        Equal(),
        (at(1, "gradients", do.counted),),
    ),
    Case(
        "numbers/scaler",
        "GradScaler: an inf in one rank's rows, all ranks skip the step",
        Equal(),
        (at(1, "step", do.overflow_with_scaler),),
        Setup(scaler=True),
        fast=True,
    ),
    Case(
        "numbers/scaler_check",
        "GradScaler and the check after unscale_",
        Equal(),
        setup=Setup(scaler=True, finite="raise"),
    ),
    Case(
        "numbers/clip_nonfinite",
        "clip_grad_norm_(error_if_nonfinite=True) with an inf on rank 1",
        Raises("RuntimeError", ("non-finite|finite",)),
        (at(1, "gradients", poison("head.weight", INF), rank=1),),
        Setup(clip=True),
        fast=True,
    ),
)


def _parity(name: str, does: str, setup: Setup, expected: Outcome = PLAIN, **more: Any) -> Case:
    return Case(f"numbers/{name}", does, expected, setup=setup, **more)


def _of_case(name: str) -> Setup:
    """A model of tests/harness/models.py on vectors, its units and its batches."""
    case = BY_NAME[name]

    def loss(run: Run, tokens: Tensor) -> Tensor:
        rank = run.rank
        if run.plain:
            rank = run.kept.setdefault("turn", 0) % run.setup.world
            run.kept["turn"] += 1
        return case.loss(run.model, case.batch(run.step, rank))

    return Setup(model=case.make, units=case.units, loss=loss)


EQUAL = (
    _parity("world_1", "one rank: bitwise plain training", Setup(world=1), Equal("plain"), fast=True),
    _parity("world_2", "two ranks beside plain training", Setup(), fast=True),
    _parity("world_3", "three ranks, rows that do not divide", Setup(world=3)),
    _parity("world_4", "four ranks, some without a row", Setup(world=4)),
    _parity("small_dims", "dims smaller than the world, four ranks", replace(_of_case("tiny_dims"), world=4)),
    _parity(
        "mixed_shapes",
        "convolutions and parameters of one to four dims, three ranks",
        replace(_of_case("mixed_shapes"), world=3),
    ),
    _parity("nested", "units inside units", _of_case("nested")),
    _parity("micro_batches", "two micro-batches, each reduced", Setup(micros=2)),
    _parity("clipped", "gradients clipped by their norm over all ranks", Setup(clip=True)),
    _parity("scaled", "with a GradScaler", Setup(scaler=True)),
    _parity("mesh_2x2", "a mesh that replicates and shards", Setup(world=4, options=do.options(mesh=do.hsdp))),
    _parity("replicated", "a mesh that only replicates", Setup(options=do.options(mesh=do.replicated))),
    _parity(
        "kept_after_forward",
        "reshard_after_forward=False",
        Setup(options=do.options(reshard_after_forward=lambda impl: False)),
    ),
    _parity(
        "part_kept",
        "reshard_after_forward=2 on four ranks",
        Setup(world=4, options=do.options(reshard_after_forward=lambda impl: 2)),
    ),
    _parity("offload", "CPU offload", Setup(options=do.options(offload_policy=do.offload))),
    _parity(
        "columns",
        "even columns are sharded: Shard(1)",
        Setup(options=do.options(shard_placement_fn=lambda impl: do.even_columns)),
    ),
    _parity(
        "torch_messages",
        "messages as torch's: FULLSHARD_COMMUNICATION=torch",
        Setup(environment=(("FULLSHARD_COMMUNICATION", "torch"),)),
    ),
    _parity(
        "no_prefetch",
        "set_memory_budget(prefetch=0): bitwise what prefetching gives",
        Setup(),
        faults=(at(-1, "wrapped", do.gather_when_needed),),
    ),
    *(
        Case(
            f"numbers/late_rank_{rank}",
            f"rank {rank} of three is late in forward and backward: bitwise the same",
            Equal(),
            (at(1, "before layers.1", rank=rank, stall=0.4), at(1, "backward layers.1", rank=rank, stall=0.4)),
            Setup(world=3),
        )
        for rank in range(3)
    ),
    Case(
        "numbers/late_bf16",
        "rank 1 is late, bfloat16 compute: bitwise the same",
        Equal(),
        (at(1, "before layers.1", rank=1, stall=0.4),),
        Setup(options=do.options(mp_policy=do.bf16)),
    ),
    Case(
        "numbers/late_replica",
        "a replica of a 2 x 2 mesh is late: bitwise the same",
        Equal(),
        (at(1, "backward layers.1", rank=2, stall=0.4),),
        Setup(world=4, options=do.options(mesh=do.hsdp)),
    ),
)


CASES: tuple[Case, ...] = (*BAD, *EQUAL)
