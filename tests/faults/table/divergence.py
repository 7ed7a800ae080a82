"""Ranks that do different things in a step: right where that is legal, otherwise an error that names who does what."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from tests.faults.actions import Action, evaluate, parameter, repeat_layer, skip_layer, swap_layers
from tests.faults.cases import PLAIN, Case, Equal, Outcome, Raises, Setup, Warns, at
from tests.faults.program import Run
from tests.threads.programs import WIDTH, Block, Model, of_blocks

# What follows is within this of the strike: some seconds of waiting, and the other ranks' own steps.
WITHIN = 8.0


def _disagree(*words: str, error: str = "RuntimeError") -> Raises:
    return Raises(error, ("rank", *words), within=WITHIN)


def _one(name: str, does: str, step: int, event: str, action: Action, expected: Outcome, **more: Any) -> Case:
    """Rank 1 alone does it."""
    return Case(f"divergence/{name}", does, expected, (at(step, event, action, rank=1),), **more)


# ---- another order, other modules ----------------------------------------------------------------------------


class _Unlike(Block):
    made = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).made += 1
        hidden = 2 * WIDTH + 1 + type(self).made % 3
        self.up = torch.nn.Linear(WIDTH, hidden)
        self.down = torch.nn.Linear(hidden, WIDTH)


class _UnlikeModel(Model):
    """Blocks of different sizes."""

    block = _Unlike

    def __init__(self) -> None:
        _Unlike.made = 0
        super().__init__()


def _drop_by_own_seed(run: Run) -> None:
    """Layer drop, whose random numbers are another on each rank."""
    skip_layer(run.rank)(run)


def _drop_by_shared_seed(run: Run) -> None:
    skip_layer(run.step % 3)(run)


def _early_exit(run: Run, tokens: Tensor) -> Tensor:
    """Leaves behind the first layer, on rank 1 in step 1."""
    depth = 1 if run.rank == 1 and run.step == 1 else None
    found: Tensor = run.model(tokens, depth=depth).pow(2).mean()
    return found


# ---- absent gradients ----------------------------------------------------------------------------------------


class _Gated(Block):
    """A part that only some ranks use."""

    used = True

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.tanh(self.up(self.norm(x)))
        return x + (self.down(inner) if self.used else inner[..., :WIDTH])


def _gate_off(run: Run) -> None:
    run.model.layers[1].used = False


def _gate_plain(run: Run, tokens: Tensor) -> Tensor:
    """The same in plain training, where this process has the batches of all ranks."""
    if run.plain and run.step >= 1:
        run.model.layers[1].used = run.kept.setdefault("turn", 0) % 2 == 0
        run.kept["turn"] += 1
    found: Tensor = run.model(tokens).pow(2).mean()
    return found


def _unused_root_part(run: Run, tokens: Tensor) -> Tensor:
    """Rank 1's loss is made of the last layer, not of the head."""
    second = run.plain and run.kept.setdefault("turn", 0) % 2 == 1
    if run.plain:
        run.kept["turn"] += 1
    out = run.model(tokens)
    return out.pow(2).mean() * (0.0 if second or run.rank == 1 else 1.0)


# ---- other counts --------------------------------------------------------------------------------------------


def _one_more_micro_batch(run: Run) -> None:
    run.loss(run.batches(step=70)[0]).backward()


def _one_more_held(run: Run) -> None:
    run.model.set_requires_gradient_sync(False)
    run.loss(run.batches(step=70)[0]).backward()
    run.model.set_requires_gradient_sync(True)


def _fewer_micro_batches(run: Run) -> None:
    run.setup = replace(run.setup, micros=1)


def _two_evaluations_more(run: Run) -> None:
    run.evaluate(2)


def _uneven_evaluation(run: Run) -> None:
    """Rank 1 has two batches more."""
    run.evaluate(2 + 2 * run.rank)


def _joined_evaluation(run: Run) -> None:
    """The same, with the call that lets ranks have unequal numbers."""
    batches = [run.batches(step=50 + i)[0] for i in range(2 + 2 * run.rank)]
    with torch.no_grad():
        for tokens in fullshard.joined(run.model, batches) if run.ours else batches:
            run.model(tokens)


def _one_step_more(run: Run) -> None:
    run.optimizer.step()


def _no_step(run: Run) -> None:
    """This rank leaves its update out, once."""
    step = run.optimizer.step

    def nothing() -> None:
        run.optimizer.step = step

    run.optimizer.step = nothing


def _sync_off(run: Run) -> None:
    run.model.set_requires_gradient_sync(False)


def _stop_here(run: Run) -> None:
    sys.exit(0)


def _no_backward(run: Run) -> None:
    """This rank finds nothing to learn from in its batch, and goes on to the update."""
    run.kept["losses"] = []


# ---- other settings ------------------------------------------------------------------------------------------


def _keep_full(run: Run) -> None:
    run.model.set_reshard_after_forward(False)


def _freeze(run: Run) -> None:
    run.model.layers[1].requires_grad_(False)


def _prefetch(run: Run) -> None:
    run.model.set_modules_to_forward_prefetch([run.model.layers[2], run.model.layers[0]])


def _no_all_reduce(run: Run) -> None:
    run.model.set_requires_all_reduce(False)


def _clip(run: Run) -> None:
    assert run.impl is not None
    run.impl.clip(run.model.parameters(), 0.05)


def _full_tensor(run: Run) -> None:
    parameter(run, "layers.1.up.weight").full_tensor()


def _full_params(run: Run) -> None:
    if run.ours:
        with fullshard.full_params(run.model):
            pass
    else:
        run.model.unshard()


def _state_dict(run: Run) -> None:
    run.model.state_dict()
    run.optimizer.state_dict()


def _unshard(run: Run) -> None:
    run.model.layers[1].unshard()


def _recompute_one(run: Run) -> None:
    from tests.faults.program import _recompute

    _recompute(run.model.layers[1])


def _longer_batch(run: Run, tokens: Tensor) -> Tensor:
    """Ranks have batches of different lengths."""
    if run.rank == 1:
        tokens = tokens[:, :2]
    found: Tensor = run.model(tokens).pow(2).mean()
    return found


def _other_buffer(run: Run) -> None:
    run.model.layers[1].scale.mul_(1.5)


class _Buffered(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


class _Normed(Block):
    """Running statistics of this rank's batches."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics = torch.nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.statistics(x.transpose(1, 2)).transpose(1, 2))


def _hsdp(impl: Any) -> dict[str, Any]:
    return {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))}


def _alternate(run: Run) -> None:
    """Another order in each step, the same on all ranks."""
    swap_layers(run.step % 2, 2)(run)


def _zero_grad_left_out(run: Run) -> None:
    """Gradients of the step before are still there."""
    run.optimizer.zero_grad = lambda: None


def _other_sizes(run: Run) -> None:
    """One block computes in another dtype from now on: messages of another size."""
    run.model.layers[1].bfloat16()


ORDER = (
    _one(
        "swapped",
        "rank 1 runs layers 0 and 1 in the other order, of equal shapes",
        1,
        "step",
        swap_layers(0, 1),
        _disagree(r"layers\.[01]"),
        fast=True,
    ),
    _one(
        "swapped_later",
        "rank 1 swaps layers 1 and 2 after several equal steps",
        3,
        "step",
        swap_layers(1, 2),
        _disagree(r"layers\.[12]"),
        setup=Setup(steps=5),
    ),
    _one(
        "swapped_in_first_step",
        "rank 1 runs layers in another order from the first step on",
        0,
        "step",
        swap_layers(0, 2),
        _disagree(r"layers\.[02]"),
    ),
    _one(
        "swapped_unlike",
        "rank 1 runs blocks of different sizes in another order",
        1,
        "step",
        swap_layers(0, 1),
        _disagree(r"layers\.[01]"),
        setup=Setup(model=_UnlikeModel),
    ),
    _one(
        "swapped_of_three",
        "rank 1 of three runs layers in another order",
        1,
        "step",
        swap_layers(0, 1),
        _disagree(r"layers\.[01]", "rank 1"),
        setup=Setup(world=3),
    ),
    _one(
        "swapped_in_evaluation",
        "rank 1 evaluates with layers in another order",
        1,
        "step",
        lambda run: (swap_layers(0, 1)(run), run.evaluate()) and None,
        _disagree(r"layers\.[01]"),
    ),
    _one("skipped", "rank 1 leaves layers.1 out", 1, "step", skip_layer(1), _disagree(r"layers\.[12]"), fast=True),
    _one("skipped_first", "rank 1 leaves layers.0 out", 1, "step", skip_layer(0), _disagree(r"layers\.[01]")),
    _one("skipped_last", "rank 1 leaves the last layer out", 1, "step", skip_layer(2), _disagree(r"layers\.2")),
    _one(
        "skipped_in_first_step",
        "rank 1 leaves layers.1 out in the first step",
        0,
        "step",
        skip_layer(1),
        _disagree(r"layers\.[12]"),
    ),
    _one("repeated", "rank 1 runs layers.1 twice", 1, "step", repeat_layer(1), _disagree(r"layers\.[12]")),
    Case(
        "divergence/dropped_by_own_seed",
        "layer drop with another random state on each rank",
        _disagree(r"layers\.[012]"),
        (at(1, "step", _drop_by_own_seed),),
    ),
    Case(
        "divergence/dropped_by_shared_seed",
        "layer drop with one random state for all ranks",
        PLAIN,
        (at(1, "step", _drop_by_shared_seed),),
    ),
    Case(
        "divergence/another_order_each_step",
        "another order of layers in each step, the same on all ranks",
        PLAIN,
        (at(1, "step", _alternate), at(2, "step", _alternate)),
    ),
    Case(
        "divergence/early_exit",
        "rank 1 leaves the forward behind its first layer, once",
        _disagree(r"layers\.[01]"),
        setup=Setup(loss=_early_exit),
    ),
    _one("recomputed_on_one", "rank 1 alone recomputes a block", 1, "step", _recompute_one, Equal("undisturbed", 2e-5)),
)

GRADIENTS = (
    _one(
        "part_unused",
        "a linear of layers.1 is unused on rank 1 from step 1 on",
        1,
        "step",
        _gate_off,
        PLAIN,
        setup=Setup(model=of_blocks(_Gated), loss=_gate_plain),
        fast=True,
    ),
    Case(
        "divergence/loss_of_zero", "rank 1's loss is zero times its output", PLAIN, setup=Setup(loss=_unused_root_part)
    ),
    _one("no_backward", "rank 1 has no backward in step 1", 1, "loss", _no_backward, _disagree()),
    Case("divergence/other_lengths", "ranks have batches of other lengths", Equal(), setup=Setup(loss=_longer_batch)),
)

COUNTS = (
    _one(
        "one_micro_batch_more",
        "rank 1 has one micro-batch more, reduced",
        1,
        "gradients",
        _one_more_micro_batch,
        _disagree(),
        fast=True,
    ),
    _one(
        "one_held_micro_batch_more",
        "rank 1 has one micro-batch more, without synchronisation",
        1,
        "step",
        _one_more_held,
        _disagree(),
    ),
    _one(
        "fewer_micro_batches",
        "rank 1 has one micro-batch less of two",
        1,
        "step",
        _fewer_micro_batches,
        _disagree(),
        setup=Setup(micros=2),
    ),
    _one(
        "evaluations_more",
        "rank 1 evaluates two batches that the others do not",
        1,
        "step",
        _two_evaluations_more,
        _disagree(),
    ),
    Case(
        "divergence/uneven_evaluation",
        "all ranks evaluate, rank 1 two batches more",
        _disagree(),
        (at(1, "step", _uneven_evaluation),),
    ),
    Case(
        "divergence/joined_evaluation",
        "all ranks evaluate, rank 1 two batches more, joined",
        Equal(),
        (at(1, "step", _joined_evaluation),),
        fast=True,
    ),
    _one("update_more", "rank 1 calls optimizer.step() once more", 1, "gradients", _one_step_more, _disagree("step")),
    _one("update_less", "rank 1 leaves an optimizer.step() out", 1, "gradients", _no_step, _disagree("step")),
    _one("sync_off", "rank 1 alone turns synchronisation off", 1, "step", _sync_off, _disagree()),
    _one("forward_more", "rank 1 runs a forward without gradients inside a step", 1, "batch", evaluate, _disagree()),
    _one(
        "ends_early",
        "rank 1 ends its training a step earlier",
        1,
        "cleared",
        _stop_here,
        Raises("PeerFailed", ("rank 1",), on=(0,), within=WITHIN),
    ),
)

SETTINGS = (
    _one(
        "keeps_full",
        "rank 1 alone keeps parameters after forward, from step 1 on",
        1,
        "step",
        _keep_full,
        _disagree(r"layers\."),
    ),
    _one("freezes", "rank 1 alone freezes a block between steps", 1, "step", _freeze, _disagree(r"layers\.1")),
    _one("other_dtype", "rank 1 alone converts a block to bfloat16", 1, "step", _other_sizes, _disagree(r"layers\.1")),
    _one(
        "prefetches",
        "rank 1 alone gives a prefetch list, in another order",
        1,
        "step",
        _prefetch,
        _disagree(r"layers\.[02]"),
    ),
    _one(
        "no_all_reduce",
        "one rank of a 2 x 2 mesh leaves the all-reduce out",
        1,
        "step",
        _no_all_reduce,
        _disagree(),
        setup=Setup(world=4, options=_hsdp),
    ),
    _one("clips", "rank 1 alone clips gradients", 1, "gradients", _clip, _disagree()),
    _one("full_tensor", "rank 1 alone asks for a full tensor", 1, "step", _full_tensor, _disagree()),
    _one("full_params", "rank 1 alone enters full_params", 1, "step", _full_params, _disagree()),
    _one("unshards", "rank 1 alone calls unshard() of a block", 1, "step", _unshard, _disagree(r"layers\.[01]")),
    _one("state_dict", "rank 1 alone takes a state dict between forward and backward", 1, "loss", _state_dict, Equal()),
    _one(
        "buffer",
        "a buffer of rank 1 goes another way between steps",
        1,
        "step",
        _other_buffer,
        Warns((r"layers\.1\.scale", "rank 1")),
        setup=Setup(model=of_blocks(_Buffered), steps=4),
    ),
    Case(
        "divergence/running_statistics",
        "BatchNorm's running statistics go apart",
        Warns((r"running_mean", "rank")),
        setup=Setup(model=of_blocks(_Normed), steps=4),
    ),
    _one(
        "zero_grad",
        "rank 1 alone forgets zero_grad()",
        0,
        "step",
        _zero_grad_left_out,
        Raises("RuntimeError", ("rank 1", "zero_grad|gradient"), within=WITHIN),
    ),
)
CASES: tuple[Case, ...] = (*ORDER, *GRADIENTS, *COUNTS, *SETTINGS)
