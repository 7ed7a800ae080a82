"""Faults for `fullshard verify` whose place it must name: each changes product code as a bug would.

    PLANTED["replica 1 negates its gradients"]     what it changes, the training that runs it, and where the fault is
    with planted(fault):                           the product has it inside

They were written before the comparison that finds them. `new` marks those in a shape that none of `PROVEN` has: in one
replica only, within what rounding in bfloat16 would explain, in held gradients, in clipping, evaluation and reload.
`place` is where a user has to look: one word of PLACES. `here` in the text of a fault is this module, whose functions
are what goes wrong; `times` counts calls, so that a fault begins at a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard._torch import current_backward
from tests.harness.seeded_faults import RECEIVE, REDUCED, SENT_FRESH, TAKE, SeededFault, seeded

# Where a fault may be, in the words that `fullshard verify` must use.
PLACES = {
    "gather": "the all-gather of weights",
    "cast": "mixed precision",
    "recomputation": "recomputation",
    "accumulation": "accumulation",
    "reduction": "the reduction",
    "replicas": "replicas",
    "prefetch": "prefetch",
    "scaler": "the scaler",
    "shards": "the shards",
    "clip": "clipping",
    "evaluation": "evaluation",
    "reload": "loading",
}


# Of these, those that show beside steps alone.
EXERCISED = ("clip", "evaluation", "reload")


class Planted(NamedTuple):
    """A fault, the strategy and the program that run it, and the word of PLACES for where it is. `phases`: those in
    which it may be found first."""

    faults: tuple[SeededFault, ...]
    strategy: str
    place: str
    phases: tuple[str, ...]
    new: bool = True
    world: int = 2
    steps: int = 2
    program: str = "program"


def change(where: str, old: str, new: str) -> SeededFault:
    return SeededFault(where, old, new, helpers=__name__)


@contextmanager
def planted(fault: Planted) -> Iterator[None]:
    """The product has the fault inside."""
    _times.clear()
    _kept.clear()
    with ExitStack() as stack:
        for each in fault.faults:
            stack.enter_context(seeded(each))
        yield


# ---- what goes wrong -------------------------------------------------------------------------------------------------

# How often each place was reached, and what was kept there.
_times: Counter[Any] = Counter()
_kept: dict[Any, Any] = {}


def times(*place: Any) -> int:
    """How often this was called for `place` before."""
    _times[place] += 1
    return _times[place] - 1


def rank() -> int:
    return dist.get_rank()


def other_replica() -> bool:
    """Whether this rank is of replica 1 of two."""
    return dist.get_rank() >= dist.get_world_size() // 2


def in_backward() -> bool:
    return current_backward() != -1


def is_named(param: Any, *names: str) -> bool:
    owner = param.owner.name if param.owner is not None else param.name
    return any(owner.endswith(name) for name in names)


def ulp_off(value: Tensor, at: int = 0) -> Tensor:
    """`value` with its element `at` moved to the next number of its dtype, further from zero."""
    value = value.clone()
    if value.numel():
        flat = value.view(-1)
        bits = flat.view({2: torch.int16, 4: torch.int32}[value.element_size()])
        bits[at] += 1  # of what is not zero or the largest number
    return value


def late(value: Tensor, *place: Any) -> Tensor:
    """What `value` was the last time; at first itself."""
    before = _kept.get(place, value)
    _kept[place] = value.clone()
    return before


def first(value: Tensor, *place: Any) -> Tensor:
    """What `value` was the first time."""
    return _kept.setdefault(place, value.clone())  # type: ignore[no-any-return]


def in_bfloat16(value: Tensor) -> Tensor:
    return value.bfloat16().to(value.dtype)


def truncated(value: Tensor) -> Tensor:
    """float32 whose lower half of bits is zero."""
    return (value.view(torch.int32) & -65536).view(torch.float32)


def last_row_lost(part: Tensor) -> Tensor:
    part = part.clone()
    if part.ndim and part.shape[0] > 1:
        part[-1] = 0
    return part


def from_evaluation(views: list[Tensor], owner: Any) -> list[Tensor]:
    """What the first evaluation gathered is used from then on."""
    if evaluates() and ("evaluation", id(owner)) not in _kept:
        _kept["evaluation", id(owner)] = [view.clone() for view in views]
    return _kept.get(("evaluation", id(owner)), views)  # type: ignore[no-any-return]


def evaluates() -> bool:
    """Whether a forward without gradients runs."""
    return not torch.is_grad_enabled() and not in_backward()


def sends(owner: Any) -> None:
    _kept["sent", id(owner)] = _times["forwards",]


def was_prefetched(owner: Any) -> bool:
    """Whether another unit's forward began after the shards were sent."""
    return _times["forwards",] > _kept["sent", id(owner)] and not in_backward()


def keep_own(reduction: Any, total: Tensor) -> None:
    if other_replica():
        _kept["own", id(reduction)] = total.clone()


def take_own(reduction: Any, total: Tensor) -> None:
    """Of replica 1: twice its own sum, where that of both was."""
    if other_replica():
        total.copy_(_kept.pop(("own", id(reduction))) * 2)


def drift(unit: Any) -> None:
    """From the second backward on, parameters of replica 1 grow by a millionth in each."""
    if in_backward() and times("drift", id(unit)) and other_replica():
        for param in unit.params:
            param.local.data.mul_(1 + 1e-6)


def moved(unit: Any) -> None:
    """An element of the first shard is one ulp off."""
    local = unit.params[0].local.data
    local.copy_(ulp_off(local))


def saved_rounded(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.clone()
        local = value.to_local()
        local.copy_(in_bfloat16(local))
    return value


def scaled(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple((value * 1.01).to(value.dtype) if value.is_floating_point() else value for value in values)


def rounded(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(in_bfloat16(value) if value.is_floating_point() else value for value in values)


# ---- where -----------------------------------------------------------------------------------------------------------

_HELD = "param.gradients:ParamGradients._commit_held"
_WITH_HELD = "param.gradients:ParamGradients.sum_with_held"
_COMMIT = "param.gradients:ParamGradients.commit"
_SEND, _COMPLETE = "comm.gather:PlannedGather.send", "comm.gather:PlannedGather.complete"
_ADVANCED, _COLLECT = "comm.reduce:StagedReduction._advanced", "comm.reduce:StagedReduction.collect"
FINISHED = "comm.reduce:StagedReduction._finished"
CLIP = "api.clip:clip_grad_norm_"
_ARRIVED = "staging.views[: len(destinations)]"
_CAST = "torch._foreach_copy_(places, own)"


def reduced(value: str) -> SeededFault:
    """`value` instead of the reduced gradient `part`, in which `param` is its parameter."""
    return change(RECEIVE, REDUCED, f"param = self.params[i]; gradients.reduced = ({value}) if")


def sent(value: str) -> SeededFault:
    """`value` instead of the full gradient `g` that this rank sends, in which `param` is its parameter."""
    return change(
        TAKE,
        SENT_FRESH,
        f"else None if gradients.fresh is None else (lambda g, param: {value})(gradients.fresh, self.params[i]))",
    )


def arrives(value: str) -> SeededFault:
    """`value` instead of the list `v` of gathered shards as they arrive."""
    return change(_COMPLETE, _ARRIVED, f"(lambda v: {value})({_ARRIVED})")


def held(value: str) -> SeededFault:
    """`value` instead of the gradient `fresh` that an earlier micro-batch holds."""
    return change(_HELD, "    self.fresh = None\n", f"    self.fresh = None\n    fresh = {value}\n")


BACKWARD, STEP = ("backward",), ("optimizer step", "optimizer state")
FORWARD = ("forward",)
_REPLICAS = "zero3+hsdp=2"

PLANTED: dict[str, Planted] = {
    # ---- one replica ----
    "replica 1 negates its gradients from step 3": Planted(
        (reduced("-part if here.other_replica() and here.times(param.name, id(self)) >= 2 else part"),),
        _REPLICAS,
        "replicas",
        BACKWARD,
        world=4,
        steps=3,
    ),
    "replica 1 has gradients a percent too large": Planted(
        (reduced("part * 1.01 if here.other_replica() else part"),), _REPLICAS, "replicas", BACKWARD, world=4
    ),
    "replica 1 has the gradients of the step before": Planted(
        (reduced("here.late(part, id(param)) if here.other_replica() else part"),),
        "zero2+hsdp=2",
        "replicas",
        BACKWARD,
        world=4,
    ),
    "replica 1 keeps its own sum": Planted(
        (
            change(
                _ADVANCED,
                "        self._work = replicate",
                "        here.keep_own(self, total)\n        self._work = replicate",
            ),
            change(
                _COLLECT,
                "        self._work.wait()\n",
                "        self._work.wait()\n            here.take_own(self, total)\n",
            ),
        ),
        _REPLICAS,
        "replicas",
        BACKWARD,
        world=4,
    ),
    "parameters of replica 1 drift": Planted(
        (
            change(
                "engine.executor:Executor._reshard",
                "    self._shelve(unit)\n",
                "    here.drift(unit)\n    self._shelve(unit)\n",
            ),
        ),
        _REPLICAS,
        "replicas",
        (*BACKWARD, *STEP),
        world=4,
    ),
    "a gradient of replica 1 is one ulp off": Planted(
        (reduced("here.ulp_off(part) if here.other_replica() and here.is_named(param, 'norm.norm.bias') else part"),),
        _REPLICAS,
        "replicas",
        BACKWARD,
        world=4,
    ),
    "one rank of replica 1 rounds one gradient": Planted(
        (reduced("here.in_bfloat16(part) if here.rank() == 3 and here.is_named(param, '1.3.weight') else part"),),
        "zero2+hsdp=2+bf16",
        "replicas",
        BACKWARD,
        world=4,
    ),
    "replicas are summed in bfloat16": Planted(
        (
            change(
                _ADVANCED, "replicate.all_reduce(total,", "replicate.all_reduce(total.copy_(here.in_bfloat16(total)),"
            ),
        ),
        "zero3+hsdp=2+bf16",
        "replicas",
        BACKWARD,
        world=4,
    ),
    "the mean over replicas is taken twice": Planted(
        (
            change(
                FINISHED,
                "    return result.to(",
                "    result = result / (1 if after.replicate is None else 2)\n    return result.to(",
            ),
        ),
        _REPLICAS,
        "replicas",
        BACKWARD,
        new=False,
        world=4,
    ),
    # ---- bfloat16, where rounding of kernels in another order would explain it ----
    "weights a percent too large in backward": Planted(
        (arrives("[x * 1.01 for x in v] if here.in_backward() else v"),), "zero3+bf16", "gather", BACKWARD
    ),
    "weights an ulp off in backward": Planted(
        (arrives("[here.ulp_off(x, 3) for x in v] if here.in_backward() else v"),), "zero3+bf16", "gather", BACKWARD
    ),
    "gradients 5 percent too large": Planted((reduced("part * 1.05"),), "zero3+bf16", "reduction", BACKWARD),
    "gradients are summed in bfloat16": Planted(
        (
            change(
                "comm.reduce:ExchangeReduce.total",
                "self.sums.dtypes.sum)",
                "torch.bfloat16).to(self.sums.dtypes.sum)",
            ),
        ),
        "zero3+bf16",
        "reduction",
        BACKWARD,
    ),
    "a rank sends one gradient an ulp off": Planted(
        (sent("here.ulp_off(g, 5) if here.rank() == 1 and here.is_named(param, 'norm.norm.weight') else g"),),
        "zero2+bf16",
        "reduction",
        BACKWARD,
    ),
    "shards are truncated to bfloat16": Planted(
        (change(_SEND, _CAST, "torch._foreach_copy_(places, [here.truncated(x) for x in own])"),),
        "zero3+bf16",
        "cast",
        FORWARD,
    ),
    "a unit does not cast its inputs in its forward": Planted(
        (
            change(
                "engine.hooks:UnitHooks._forward_begins",
                "policy.param_dtype if policy.cast_forward_inputs else",
                "policy.param_dtype if policy.cast_forward_inputs and not unit.record.name.endswith('waves') else",
            ),
        ),
        "zero3+bf16",
        "cast",
        FORWARD,
        program="timed",
    ),
    # ---- held gradients ----
    "held gradients are kept in bfloat16": Planted(
        (held("here.in_bfloat16(fresh)"),), "zero3+micro=2", "accumulation", BACKWARD
    ),
    "held gradients are added in bfloat16": Planted(
        (change(_WITH_HELD, "    return held +", "    return here.in_bfloat16(held) +"),),
        "zero3+bf16+micro=3",
        "accumulation",
        BACKWARD,
    ),
    "held gradients are kept twice": Planted(
        (held("fresh if here.times(id(self)) % 2 else 2 * fresh"),), "zero2+micro=3", "accumulation", BACKWARD
    ),
    "held gradients of one parameter are dropped": Planted(
        (held("fresh * 0 if here.is_named(self._param, 'norm.norm.weight') else fresh"),),
        "zero3+micro=2",
        "accumulation",
        BACKWARD,
        new=False,
    ),
    "held gradients are a percent too small": Planted(
        (held("fresh * 0.99"),), "zero3+bf16+micro=2", "accumulation", BACKWARD
    ),
    "held gradients are those of the step before": Planted(
        (held("here.late(fresh, id(self))"),), "zero3+micro=2", "accumulation", BACKWARD
    ),
    "the last micro-batch is not added": Planted(
        (change(_WITH_HELD, "    return held +", "    return held + 0 *"),),
        "zero2+bf16+micro=2",
        "accumulation",
        BACKWARD,
    ),
    # ---- clipping ----
    "the norm is that of local shards": Planted(
        (change(CLIP, "        for group in own:\n", "        for group in ():\n"),), "zero3", "clip", ("clipping",)
    ),
    "the norm counts replicas twice": Planted(
        (change(CLIP, "    norm = norm.float()\n", "    norm = norm.float() * 2**0.5\n"),),
        _REPLICAS,
        "clip",
        ("clipping",),
        world=4,
    ),
    "gradients are clipped twice": Planted(
        (change(CLIP, "torch._foreach_mul_(locals_, scale)", "torch._foreach_mul_(locals_, scale * scale)"),),
        "zero2",
        "clip",
        ("clipping",),
    ),
    "the first unit is not clipped": Planted(
        (change(CLIP, "torch._foreach_mul_(locals_, scale)", "torch._foreach_mul_(locals_[2:], scale)"),),
        "zero3",
        "clip",
        ("clipping",),
    ),
    "the norm of bfloat16 numbers": Planted(
        (change(CLIP, "    norm = norm.float()\n", "    norm = norm.bfloat16().float()\n"),),
        "zero3+bf16",
        "clip",
        ("clipping",),
    ),
    # ---- evaluation ----
    "an evaluation leaves stale weights": Planted(
        (arrives("here.from_evaluation(v, self)"),), "zero3", "evaluation", ("evaluation",), steps=3
    ),
    "an evaluation computes with one unit's first weights": Planted(
        (arrives("[here.first(x, id(self), i) for i, x in enumerate(v)] if here.evaluates() else v"),),
        "zero3",
        "evaluation",
        ("evaluation",),
        steps=3,
    ),
    "an evaluation computes with weights that are not cast right": Planted(
        (
            change(
                _SEND,
                _CAST,
                "torch._foreach_copy_(places, [here.truncated(x) for x in own] if here.evaluates() else own)",
            ),
        ),
        "zero3+bf16",
        "evaluation",
        ("evaluation",),
    ),
    "an evaluation draws random numbers": Planted(
        (arrives("[x + 0 * torch.rand(1, dtype=x.dtype) for x in v] if here.evaluates() else v"),),
        "zero2",
        "evaluation",
        ("generators", "evaluation"),
    ),
    # ---- reload ----
    "a state dict loses the last row of each shard": Planted(
        (
            change(
                "engine.state_dict:_sharded_as",
                "    part = local_part(value, parameter)\n",
                "    part = here.last_row_lost(local_part(value, parameter))\n",
            ),
        ),
        "zero3",
        "reload",
        ("state dicts", "checkpoint"),
    ),
    "a state dict has rounded values": Planted(
        (
            change(
                "engine.state_dict:_ModuleHooks.after_saving",
                "        value = state_dict.get(key)\n",
                "        value = state_dict[key] = here.saved_rounded(state_dict.get(key))\n",
            ),
        ),
        "zero2",
        "reload",
        ("state dicts", "checkpoint"),
        steps=3,
    ),
    # ---- the rest ----
    "weights a percent too large in backward, float32": Planted(
        (arrives("[x * 1.01 for x in v] if here.in_backward() else v"),), "zero3", "gather", BACKWARD
    ),
    "weights are stale where they are computed again": Planted(
        (arrives("[here.first(x, id(self), i) for i, x in enumerate(v)] if here.in_backward() else v"),),
        "zero3+recompute",
        "gather",
        BACKWARD,
        new=False,
    ),
    "kept weights are scaled": Planted(
        (
            change(
                "param.group:SecondaryGroup.keep",
                "    torch._foreach_copy_(self._parts, self._sources)",
                "    torch._foreach_copy_(self._parts, [x * 1.001 for x in self._sources])",
            ),
        ),
        "zero3=2",
        "gather",
        BACKWARD,
        world=4,
    ),
    "the last row of each shard gets no gradient": Planted(
        (reduced("here.last_row_lost(part)"),), "zero3", "reduction", BACKWARD, new=False
    ),
    "a rank sends the gradients of the step before": Planted(
        (sent("here.late(g, id(param)) if here.rank() == 1 else g"),), "zero2", "reduction", BACKWARD, new=False
    ),
    "gradients are negated every third step": Planted(
        (reduced("-part if here.times(id(param)) % 3 == 2 else part"),), "zero2", "reduction", BACKWARD, steps=3
    ),
    "one gradient is one ulp off": Planted(
        (reduced("here.ulp_off(part) if here.is_named(param, '0.3.bias') else part"),), "zero3", "reduction", BACKWARD
    ),
    "one of three ranks sends rounded gradients": Planted(
        (sent("here.in_bfloat16(g) if here.rank() == 2 else g"),), "zero3", "reduction", BACKWARD, world=3
    ),
    "weights are an ulp off on one rank": Planted(
        (arrives("[here.ulp_off(x, 7) for x in v] if here.rank() == 1 else v"),), "zero3", "gather", FORWARD
    ),
    "shards move by an ulp after a step": Planted(
        (
            change(
                "engine.executor:Executor._finish",
                "    for unit in self._backward.touched:\n        for position",
                "    for unit in self._backward.touched:\n        here.moved(unit)\n        for position",
            ),
        ),
        "zero3",
        "shards",
        (*BACKWARD, *STEP),
    ),
    "inputs of units that are computed again are rounded": Planted(
        (
            change(
                "engine.hooks:UnitHooks._forward_begins",
                "    unit = self._unit\n",
                "    unit = self._unit\n    args = here.rounded(args) if here.in_backward() else args\n",
            ),
        ),
        "zero3+recompute",
        "recomputation",
        BACKWARD,
        program="timed",
    ),
    "inputs of units that are computed again are a percent too large": Planted(
        (
            change(
                "engine.hooks:UnitHooks._forward_begins",
                "    unit = self._unit\n",
                "    unit = self._unit\n    args = tuple(a * 1.01 for a in args) if here.in_backward() else args\n",
            ),
        ),
        "zero3+bf16+recompute",
        "recomputation",
        BACKWARD,
        program="timed",
    ),
    "weights that are prefetched arrive scaled": Planted(
        (
            change(
                "engine.hooks:UnitHooks._forward_begins",
                "    unit = self._unit\n",
                "    unit = self._unit\n    here.times('forwards')\n",
            ),
            change(_SEND, "    staging =", "    here.sends(self)\n    staging ="),
            arrives("[x * 1.001 for x in v] if here.was_prefetched(self) else v"),
        ),
        "zero3",
        "prefetch",
        FORWARD,
        steps=3,
    ),
    "the scaler does not unscale the last gradient": Planted(
        (change("api.clip:_local_views", "    return views\n", "    return views[:-1]\n"),),
        "zero3+fp16",
        "scaler",
        BACKWARD,
    ),
}
