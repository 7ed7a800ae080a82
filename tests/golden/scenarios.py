"""Small training programs in which the order of unshard, wait, reshard and reduce is worth knowing.

Each is written once for any implementation of `fully_shard`: torch's is recorded into the golden traces, ours
is compared with them. They only use what both have, assume an initialised process group, and never look at a
value, so a fake group will do.

    scenario = SCENARIOS["two_steps"]
    model = scenario.build(fully_shard, True)       # reshard_after_forward of every unit
    scenario.run(model)

The models are in models.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.golden import models
from tests.golden.models import FEATURES, Build

RESHARD: dict[str, bool | int | None] = {"true": True, "false": False, "none": None, "two": 2}


def world_of(reshard: str) -> int:
    """How many ranks a case has: two, and four where two of them keep parameters together."""
    return 4 if reshard == "two" else 2


Run = Callable[[Any], None]


class Scenario(NamedTuple):
    """A model under a policy, and what is done with it."""

    name: str
    build: Build
    run: Run
    # One line: what is looked at.
    about: str


# ---- running -----------------------------------------------------------------------------------------------


def tokens() -> Tensor:
    """One integer for each position of a short text."""
    return torch.arange(3)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _update(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def _train(model: Any, steps: int = 2, inputs: Callable[[], Tensor] = tokens) -> None:
    optimizer = _optimizer(model)
    for _ in range(steps):
        model(inputs()).sum().backward()
        _update(optimizer)


def _train_floats(model: Any) -> None:
    _train(model, inputs=lambda: torch.ones(3, FEATURES))


def _two_forwards_one_backward(model: Any) -> None:
    optimizer = _optimizer(model)
    for _ in range(2):
        (model(tokens()).sum() + model(tokens()).sum()).backward()
        _update(optimizer)


def _two_forwards_two_backwards(model: Any) -> None:
    first, second = model(tokens()).sum(), model(tokens()).sum()
    first.backward()
    second.backward()


def _interleaved_micro_batches(model: Any) -> None:
    first = model(tokens()).sum()
    second = model(tokens()).sum()
    model.set_is_last_backward(False)
    first.backward()
    third = model(tokens()).sum()
    second.backward()
    model.set_is_last_backward(True)
    third.backward()


def _one_forward_two_backwards(model: Any) -> None:
    loss = model(tokens()).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    model(tokens()).sum().backward()


def _no_grad_then_train(model: Any) -> None:
    with torch.no_grad():
        model(tokens())
    _train(model)
    with torch.no_grad():
        model(tokens())
        model(tokens())


def _branching(model: Any) -> None:
    optimizer = _optimizer(model)
    for order in ([0, 1, 2], [0, 2], [0, 1, 2]):
        model(tokens(), order).sum().backward()
        _update(optimizer)


def _prefetched_but_unused(model: Any) -> None:
    with torch.no_grad():
        model(tokens(), [0, 2, 3])
        model(tokens())
    optimizer = _optimizer(model)
    for order in ([0, 2, 3], [0, 1, 2, 3]):
        model(tokens(), order).sum().backward()
        _update(optimizer)


def _unused_in_backward(model: Any) -> None:
    optimizer = _optimizer(model)
    for _ in range(2):
        loss, side = model(tokens())
        loss.sum().backward()
        _update(optimizer)


def _block_used_twice(model: Any) -> None:
    optimizer = _optimizer(model)
    for _ in range(2):
        model(tokens(), [0, 1, 0, 2]).sum().backward()
        _update(optimizer)


def _accumulate(model: Any) -> None:
    optimizer = _optimizer(model)
    for _ in range(2):
        model.set_requires_gradient_sync(False)
        model(tokens()).sum().backward()
        model.set_requires_gradient_sync(True)
        model(tokens()).sum().backward()
        _update(optimizer)


def _accumulate_keeping_full(model: Any) -> None:
    optimizer = _optimizer(model)
    for _ in range(2):
        model.set_requires_gradient_sync(False)
        model.set_reshard_after_backward(False)
        model(tokens()).sum().backward()
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)
        model(tokens()).sum().backward()
        _update(optimizer)


def _keep_after_backward(model: Any) -> None:
    model.set_reshard_after_backward(False)
    model(tokens()).sum().backward()
    model(tokens()).sum().backward()
    for module in (model, *model.layers):
        module.reshard()


def _unshard_before_forward(model: Any) -> None:
    model(tokens()).sum().backward()
    model.layers[0].unshard()
    handle = model.layers[1].unshard(async_op=True)
    model.layers[2].unshard(async_op=True)
    handle.wait()
    model(tokens()).sum().backward()
    model.unshard()
    model.unshard()
    model.reshard()
    model.reshard()


def _submodule_forward(model: Any) -> None:
    _train(model, 1)
    with torch.no_grad():
        model.layers[1](torch.ones(3, FEATURES))
    model.layers[1](torch.ones(3, FEATURES)).sum().backward()
    _train(model, 1)


def _evaluate_between_micro_batches(model: Any) -> None:
    loss = model(tokens()).sum()
    with torch.no_grad():
        model(tokens())
    loss.backward()


_ALL = (
    Scenario("two_steps", models.plain, _train, "two training steps"),
    Scenario(
        "two_forwards_one_backward", models.plain, _two_forwards_one_backward, "two forwards, one backward of both"
    ),
    Scenario(
        "checkpoint_inside",
        models.recompute_inside("non-reentrant"),
        _train,
        "fully_shard(checkpoint(block)), non-reentrant: recomputation does not pass the unit's hooks",
    ),
    Scenario(
        "checkpoint_inside_reentrant",
        models.recompute_inside("reentrant"),
        _train,
        "fully_shard(checkpoint(block)), reentrant: a backward in the backward",
    ),
    Scenario(
        "checkpoint_outside",
        models.recompute_outside("non-reentrant"),
        _train,
        "checkpoint(fully_shard(block)), non-reentrant: recomputation passes the unit's hooks",
    ),
    Scenario("no_grad_then_train", models.plain, _no_grad_then_train, "evaluation before and after training"),
    Scenario("branching", models.plain, _branching, "layers.1 runs in the first and third step only"),
    Scenario("unused_in_backward", models.side, _unused_in_backward, "the output of layers.1 does not reach the loss"),
    Scenario("forward_prefetch_lists", models.forward_lists, _train, "explicit lists of two units in forward"),
    Scenario(
        "forward_prefetch_unused",
        models.forward_lists,
        _prefetched_but_unused,
        "the lists gather layers.1, which does not run each time",
    ),
    Scenario("backward_prefetch_lists", models.backward_lists, _train, "explicit lists of two units in backward"),
    Scenario(
        "checkpoint_outside_reentrant",
        models.recompute_outside("reentrant"),
        _train,
        "checkpoint(fully_shard(block)), reentrant",
    ),
    Scenario(
        "checkpoint_segments",
        models.recompute_outside("segments"),
        _train,
        "one non-reentrant checkpoint around two units",
    ),
    Scenario(
        "checkpoint_by_hooks",
        models.recompute_by_hooks,
        _train,
        "checkpointing and sharding are both hooks of the block: recomputation passes the unit's hooks",
    ),
    Scenario(
        "checkpoint_block_used_twice",
        models.recompute_outside("non-reentrant"),
        _block_used_twice,
        "checkpoint(fully_shard(block)), non-reentrant, and layers.0 runs twice",
    ),
    Scenario(
        "checkpoint_two_forwards",
        models.recompute_outside("non-reentrant"),
        _two_forwards_one_backward,
        "checkpoint(fully_shard(block)), non-reentrant, two forwards, one backward of both",
    ),
    Scenario(
        "checkpoint_nested_units",
        models.nested_recomputed("non-reentrant"),
        _two_forwards_one_backward,
        "checkpoint(fully_shard(block)), non-reentrant, with a unit in each block, two forwards",
    ),
    Scenario(
        "checkpoint_nested_units_reentrant",
        models.nested_recomputed("reentrant"),
        _train,
        "checkpoint(fully_shard(block)), reentrant, with a unit in each block",
    ),
    Scenario("nested_units", models.nested, _train, "a unit inside a unit"),
    Scenario("accumulation", models.plain, _accumulate, "the first micro-batch of two does not reduce"),
    Scenario(
        "accumulation_keeping_full",
        models.plain,
        _accumulate_keeping_full,
        "the first micro-batch of two neither reduces nor frees",
    ),
    Scenario("keep_after_backward", models.plain, _keep_after_backward, "set_reshard_after_backward(False)"),
    Scenario("frozen_unit", models.frozen, _train, "no parameter of layers.1 needs a gradient"),
    Scenario("block_used_twice", models.plain, _block_used_twice, "layers.0 runs twice in one forward"),
    Scenario("unshard_before_forward", models.plain, _unshard_before_forward, "unshard() and reshard() by the user"),
    Scenario("inputs_need_no_grad", models.float_inputs, _train_floats, "inputs of root and layers.0 need no gradient"),
    Scenario("bare_root", models.bare_root, _train_floats, "the root has no parameters of its own"),
    Scenario("two_outputs", models.two_outputs, _train, "layers.0 has two outputs that reach the loss"),
    Scenario("two_forwards_two_backwards", models.plain, _two_forwards_two_backwards, "the backwards run one by one"),
    Scenario(
        "interleaved_micro_batches",
        models.plain,
        _interleaved_micro_batches,
        "as a pipeline does: set_is_last_backward(False) until the last backward",
    ),
    Scenario(
        "one_forward_two_backwards",
        models.plain,
        _one_forward_two_backwards,
        "a graph that is kept, then a fresh step",
    ),
    Scenario("submodule_forward", models.plain, _submodule_forward, "layers.1 is called on its own between steps"),
    Scenario(
        "no_grad_before_backward",
        models.plain,
        _evaluate_between_micro_batches,
        "evaluation between forward and backward",
    ),
)

SCENARIOS: dict[str, Scenario] = {scenario.name: scenario for scenario in _ALL}


def cases() -> list[tuple[Scenario, str]]:
    """Every scenario with every value of reshard_after_forward, by its name in file names."""
    return [(scenario, reshard) for scenario in _ALL for reshard in RESHARD]
