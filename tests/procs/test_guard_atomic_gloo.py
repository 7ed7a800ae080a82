"""An exception at any line of the guard in a training step over gloo, with retry: bitwise the clean run, or an error on
all ranks. As tests/pure/test_guard_atomic.py, which simulates its ranks, with the engine around it."""

from __future__ import annotations

import copy
import inspect
import linecache
import os
import random
import sys
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fullshard
from fullshard.peers import Watch, watch
from tests.harness.forked import run_forks
from tests.harness.models import seeded
from tests.threads.programs import Model, batch, part, shard

ROOM = os.path.dirname(inspect.getfile(Watch)) + os.sep
BASE: Any = seeded(Model)
WORLD, STEPS, ATTEMPTS = 2, 3, 6
SECONDS = 60.0


class Interrupt(KeyboardInterrupt):
    """What is thrown in."""


class Tracer:
    """Counts lines of the room in this thread, and raises at some of them."""

    def __init__(self, lines: list[int]) -> None:
        self.lines, self.passed, self.where = sorted(lines), 0, ""

    def __call__(self, frame: Any, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(ROOM):
            return None
        if event == "line":
            self.passed += 1
            if self.lines and self.passed >= self.lines[0]:
                # Python itself raises nothing from outside between the end of a block and its `__exit__`.
                line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
                if not line.lstrip().startswith("with "):
                    self.lines.pop(0)
                    self.where += f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} "
                    raise Interrupt(self.where)
        return self


class Trained(NamedTuple):
    """Lines passed, where it was interrupted, the error that it gave up with, the steps taken, its shards."""

    passed: int
    where: str
    error: str
    steps: int
    shards: list[Tensor]


def _train(rank: int, lines: dict[int, list[int]]) -> Trained:
    torch.manual_seed(0)
    model = copy.deepcopy(BASE)
    shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    tracer, error, failures, step = Tracer(lines.get(rank, [])), "", 0, 0
    sys.settrace(tracer)
    try:
        while step < STEPS:
            try:
                optimizer.zero_grad()
                with fullshard.guard(model):
                    model(part(batch(dist.get_world_size(), step), rank)).pow(2).mean().backward()
            except (Interrupt, fullshard.PeerFailed, fullshard.RanksDisagree) as caught:
                failures += 1
                if failures == ATTEMPTS or isinstance(caught, fullshard.RanksDisagree):
                    raise
                continue
            optimizer.step()
            step += 1
    except (Interrupt, fullshard.PeerFailed, fullshard.RanksDisagree) as caught:
        error = f"{type(caught).__name__}: {caught}"
    finally:
        sys.settrace(None)
        here = watch()
        assert here is not None
        here.end("its process ended")
    return Trained(tracer.passed, tracer.where, error, step, [p.to_local().detach() for p in model.parameters()])


@pytest.fixture(scope="module")
def clean() -> Any:
    found = run_forks(WORLD, _train, ({},), SECONDS)
    assert not any(one.error for one in found)
    return found


def _check(seed: int, clean: Any) -> None:
    draw = random.Random(seed)
    ranks = draw.sample(range(WORLD), draw.choice((1, 1, 2)))
    lines = {rank: [draw.randint(1, clean[rank].passed) for _ in range(draw.choice((1, 1, 2)))] for rank in ranks}
    found = run_forks(WORLD, _train, (lines,), SECONDS)
    told = f"seed {seed}: {[(one.where, one.error, one.steps) for one in found]}"
    # One that is interrupted after it said that it came to the end of the last step fails alone.
    failed = [one for one in found if one.error]
    assert len(failed) in (0, WORLD) or all(one.steps == STEPS - 1 for one in failed), told
    for mine, expected in zip(found, clean, strict=True):
        same = all(torch.equal(a, b) for a, b in zip(mine.shards, expected.shards, strict=True))
        assert mine.error or same, told


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(4))
def test_an_exception_in_a_step(seed: int, clean: Any) -> None:
    _check(seed, clean)


@pytest.mark.slow
@pytest.mark.hang_after(3600)
def test_an_exception_in_a_step_at_length(clean: Any) -> None:
    for seed in range(4, 200):
        _check(seed, clean)
