"""What a compiled loss holds, by the plan: the logits and their gradient, in their dtype."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fullshard.plan import Planner, Strategy, find_hardware
from fullshard.plan.compiled import FUSED
from fullshard.plan.description import Model
from fullshard.plan.facts import describe
from fullshard.plan.spans import Step, steps_of
from fullshard.program import Program
from fullshard.train.model import LlamaShape
from fullshard.train.shapes import language_model

VOCABULARY, LENGTH = 2048, 256
LOGITS = VOCABULARY * LENGTH


def program() -> Program:
    return language_model(LlamaShape(VOCABULARY, 2, 32, 2, 2, 64, LENGTH, tie_embeddings=False), LENGTH)


def described(loss: Any = None) -> Model:
    asked = program() if loss is None else replace(program(), loss=loss)
    return describe(asked, "model", compute="bfloat16")


def held_by_loss(step: Step) -> float:
    """The most between the forward and the backward of the model, without what blocks keep for backward."""
    place = next(i for i, span in enumerate(step.spans) if span.event is not None and span.event.kind == "loss")
    return max(step.spans[place - 1].peak, step.spans[place].peak)


def test_a_compiled_loss_holds_logits_and_their_gradient() -> None:
    model = described()
    eager, compiled = steps_of(model), steps_of(model, compiled_loss=True)
    # In backward: the softmax, the gradient of it and of the logits, in float32; of two bytes: logits and gradient.
    assert held_by_loss(eager) - held_by_loss(compiled) == pytest.approx(LOGITS * (3 * 4 - 2 * 2), rel=0.01)
    assert compiled.spans[-1].end == eager.spans[-1].end == 4, "the loss itself"
    # Forward reads the logits; backward reads them and writes their gradient.
    assert FUSED not in [line.name for line in model.tape.lines]
    assert eager.work.nbytes - compiled.work.nbytes > 8 * LOGITS and compiled.work.matmul == eager.work.matmul
    whole = steps_of(model, "whole", compiled_loss=True)
    assert held_by_loss(steps_of(model, "whole")) - held_by_loss(whole) == held_by_loss(eager) - held_by_loss(compiled)


def test_a_loss_in_the_dtype_of_the_logits() -> None:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    model = described(loss)
    saved = held_by_loss(steps_of(model)) - held_by_loss(steps_of(model, compiled_loss=True))
    assert saved == pytest.approx(LOGITS * (3 * 2 - 2 * 2), rel=0.01)


def test_what_cannot_be_compiled_so_is_refused() -> None:
    def with_product(model: Any, batch: Any) -> torch.Tensor:
        out = model(batch[0])
        return (out @ out.mT).float().mean()

    def inside(model: Any, batch: Any) -> torch.Tensor:
        return model(batch[0]).sum()  # type: ignore[no-any-return]

    with pytest.raises(ValueError, match="compiled_loss: expected a loss of pointwise operations and sums, found aten"):
        steps_of(described(with_product), compiled_loss=True)
    with pytest.raises(ValueError, match="compiled_loss: expected a loss outside of the model, found none"):
        steps_of(described(inside), compiled_loss=True)


@pytest.mark.slow
def test_a_plan_with_a_compiled_loss() -> None:
    planner = Planner(lambda n, s, c, a, r: describe(program(), "m", samples=n, compute=c), find_hardware("h100"))
    asked = Strategy(ranks=2, compute="bfloat16", reduce="float32", micro=3)
    for plan in (planner.plan, planner.estimate):
        eager, compiled = plan(asked), plan(replace(asked, compiled_loss=True))
        assert dict(compiled.terms).get("loss", 0) < dict(eager.terms)["loss"] / 2
        assert compiled.peak_nbytes < eager.peak_nbytes and compiled.seconds < eager.seconds
        assert "compiled loss" in str(compiled.strategy) and compiled.as_json()["strategy"]["compiled_loss"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_inductor_makes_the_gradient_alone() -> None:
    """What it allocates on this CPU that is as large as the logits."""
    logits = torch.randn(64, VOCABULARY, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(VOCABULARY, (64,))
    loss = torch.compile(lambda x: F.cross_entropy(x.float(), targets))
    loss(logits).backward()
    logits.grad = None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as run:
        loss(logits).backward()
    made = [event.nbytes() for event in run.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert max(n for n in made if n != logits.nbytes) == 64 * 4, "a number for each token"
    assert made.count(logits.nbytes) == 1
