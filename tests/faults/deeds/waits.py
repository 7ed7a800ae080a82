"""What the cases of waits and of first contacts do."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

import fullshard
from tests.faults.actions import Action, local
from tests.faults.program import Run, steps
from tests.harness.models import seeded
from tests.threads.programs import Model, shard


def sleep(seconds: float) -> Action:
    """This rank is alive, and does nothing for so long."""

    def action(run: Run) -> None:
        time.sleep(seconds)

    return action


def throw_once(run: Run) -> None:
    raise RuntimeError("injected")


def leave(run: Run) -> None:
    """The program of this rank ends here, well."""
    sys.exit(0)


def set_environment(**values: str) -> Action:
    def action(run: Run) -> None:
        os.environ.update(values)

    return action


# ---- what all ranks call ------------------------------------------------------------------------------------


def synchronise(run: Run) -> None:
    if run.ours:
        fullshard.sync_module_states(run.model)
    elif not run.plain:
        for value in [*run.model.parameters(), *run.model.buffers()]:
            dist.broadcast(value.data, 0)


def synchronise_buffers(run: Run) -> None:
    if run.ours:
        fullshard.sync_module_states(run.model, buffers_only=True)


def on_meta(run: Run) -> None:
    run.model.to("meta")


def _draw(module: nn.Module) -> None:
    for p in module.parameters(recurse=False):
        p.normal_(0.0, 0.1)


def materialize(run: Run) -> None:
    if run.ours or run.plain:
        fullshard.materialize(run.model, seed=3, init=_draw)


def write_values(run: Run) -> None:
    """Values by hand, instead of materialize."""
    run.model.to_empty(device="cpu")
    with torch.no_grad():
        for p in run.model.parameters():
            local(p).fill_(0.1)


def full_params(run: Run) -> None:
    if run.ours:
        with fullshard.full_params(run.model):
            pass


def guard(run: Run) -> None:
    """A guarded block in which nothing is sent."""
    if run.ours:
        with fullshard.guard(run.model):
            pass


def clip(run: Run) -> None:
    run.clip()


def check(run: Run) -> None:
    if run.ours:
        fullshard.check_gradients(run.model)


def find_drift(run: Run) -> None:
    if run.ours:
        fullshard.find_drift(run.model)


def second_model(run: Run) -> None:
    """Another sharded model, of which nothing is asked."""
    assert run.impl is not None
    run.kept["second"] = shard(seeded(Model, seed=5), run.impl)


def train_second_model(run: Run) -> None:
    """A step of another sharded model, before the one of all ranks."""
    second_model(run)
    run.kept["second"](run.batches(step=70)[0]).pow(2).mean().backward()


def fails_in_fully_shard(run: Run) -> None:
    assert run.impl is not None
    run.impl.fully_shard(run.model.layers[0])
    run.impl.fully_shard(run.model.layers[1], reshard_after_forward="sometimes")


def half_built(then: Action) -> Action:
    """After its first unit."""

    def action(run: Run) -> None:
        assert run.impl is not None
        run.impl.fully_shard(run.model.layers[0])
        then(run)

    return action


def begun_twice(run: Run) -> None:
    """A build that fails on rank 1 at first, and is tried again by it alone; the others wait."""
    run.step = -1
    try:
        run.build()
    except RuntimeError:
        run.model = run.optimizer = None
        run.build()
    steps(run)


def forward(run: Run) -> None:
    run.loss(run.batches(step=70)[0])
