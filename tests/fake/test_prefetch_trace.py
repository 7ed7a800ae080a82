"""What the engine gathers ahead, read off its trace: issued before the compute that hides it, waited for after it.

Each linear layer below notes its own compute among the events and commands (`= layers.0`), so that a line above it was
done before the kernels of that layer, and a line below it after them. On a fake group nothing is ever late, and no
value means anything: what is looked at is the order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fullshard import fully_shard
from fullshard.engine import unit_of
from fullshard.observe import Trace, record
from fullshard.policy import use_options
from fullshard.schedule import Full
from tests.golden import models
from tests.harness.behaviours import behaviour
from tests.harness.fake import fake_world

BLOCKS = 4


class Noted(nn.Linear):
    """A linear layer that writes its compute into `trace`, forward and backward, and never computes on a shard."""

    trace: Trace | None = None
    name: str = ""

    def forward(self, input: Tensor) -> Tensor:
        assert not isinstance(self.weight, DTensor) and self.weight.untyped_storage().size(), self.name
        self._note("=")
        output = super().forward(input)
        if output.requires_grad:
            assert output.grad_fn is not None
            # The hook of the unit on the same node came later and runs later: this one is behind the unit's own.
            output.grad_fn.register_hook(lambda *_: self._note("=="))
        return output

    def _note(self, sign: str) -> None:
        if self.trace is not None:
            self.trace.lines.append(f"{sign} {self.name}")


class Tower(nn.Module):
    """`BLOCKS` layers of (3, 3) without bias below a root with an embedding and a head. `order`: which layers run."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.layers = nn.ModuleList([Noted(3, 3, bias=False) for _ in range(BLOCKS)])
        self.head = nn.Linear(3, 2)

    def forward(self, tokens: Tensor, order: Sequence[int] = range(BLOCKS)) -> Tensor:
        x = self.embed(tokens)
        for i in order:
            x = self.layers[i](x)
        return self.head(x)


@pytest.fixture(autouse=True)
def defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULLSHARD_CHECK", "1")


@pytest.fixture
def tower() -> Iterator[Any]:
    """On rank 0 of four, sharded layer by layer, run by nobody yet."""
    with fake_world(4):
        model = Tower()
        for name, module in model.named_modules():
            if isinstance(module, Noted):
                module.name = name
                fully_shard(module)
        yield fully_shard(model)


def traced(model: Any, order: Sequence[int] = range(BLOCKS), *, train: bool = True) -> list[str]:
    """The lines of one step (or of one forward without gradients)."""
    with record(model) as trace:
        for layer in model.layers:
            layer.trace = trace
        if train:
            model(torch.arange(3), order).sum().backward()
        else:
            with torch.no_grad():
                model(torch.arange(3), order)
        for layer in model.layers:
            layer.trace = None
    return [line.strip() for line in trace.lines]


def during(lines: list[str], event: str) -> list[str]:
    """The commands under the only event that begins with `event`."""
    (start,) = [i for i, line in enumerate(lines) if f"{line} ".startswith(f"> {event} ")]
    behind = lines[start + 1 :]
    end = next((i for i, line in enumerate(behind) if line[0] in ">="), len(behind))
    return behind[:end]


def layer(i: int) -> str:
    return f"layers.{i}"


# ---- along the recorded order --------------------------------------------------------------------------------


def test_the_first_step_gathers_when_needed(tower: Any) -> None:
    """Nothing is recorded yet: each layer is gathered and waited for in its own `pre_forward`."""
    lines = traced(tower)
    for i in range(BLOCKS):
        assert during(lines, f"pre_forward layers.{i}") == [f"unshard layers.{i}", f"wait layers.{i}"]


def test_a_forward_issues_the_next_gather_before_its_own_compute(tower: Any) -> None:
    """From the second step on: the next layer's gather is issued in this one's `pre_forward`, and waited for in its
    own, with this one's compute in between.
    """
    traced(tower)
    for _ in range(2):
        lines = traced(tower)
        assert during(lines, "pre_forward root") == ["unshard root", "wait root", "unshard layers.0"]
        for i in range(BLOCKS - 1):
            assert during(lines, f"pre_forward layers.{i}") == [f"wait layers.{i}", f"unshard layers.{i + 1}"]
            issued, computed, waited = (
                lines.index(line) for line in (f"unshard layers.{i + 1}", f"= layers.{i}", f"wait layers.{i + 1}")
            )
            assert issued < computed < waited
        assert during(lines, f"pre_forward layers.{BLOCKS - 1}") == [f"wait layers.{BLOCKS - 1}"]


def test_a_backward_issues_the_next_gather_before_its_own_compute(tower: Any) -> None:
    """In every step, the first one too: backward follows the forward of its own step."""
    for _ in range(2):
        lines = traced(tower)
        lines = lines[lines.index("> pre_backward root") :]
        assert during(lines, "pre_backward root") == [f"unshard layers.{BLOCKS - 1}"]
        for i in range(BLOCKS - 1, 0, -1):
            assert during(lines, f"pre_backward layers.{i}") == [f"wait layers.{i}", f"unshard layers.{i - 1}"]
            issued, computed, waited = (
                lines.index(line) for line in (f"unshard layers.{i - 1}", f"== layers.{i}", f"wait layers.{i - 1}")
            )
            assert issued < computed < waited
        assert during(lines, "pre_backward layers.0") == ["wait layers.0"]


def test_evaluation_gathers_ahead_too(tower: Any) -> None:
    """Along what the last pass recorded, with or without gradients."""
    traced(tower, train=False)
    lines = traced(tower, train=False)
    assert during(lines, "pre_forward layers.0") == ["wait layers.0", "unshard layers.1"]


def test_no_more_than_two_layers_have_memory(tower: Any) -> None:
    """The one that computes and the one that travels; and none when the step is over."""
    traced(tower)
    live: set[str] = set()
    most = 0
    for line in traced(tower):
        kind, unit, *_ = line.split()
        if kind == "unshard":
            live.add(unit)
        elif kind in ("reshard", "cancel"):
            live.discard(unit)
        most = max(most, len(live - {"root"}))
    assert most == 2 and not live


# ---- another order -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (3, 2, 1, 0), (0, 2, 3), (0,), (1, 1, 0), (0, 1, 2, 3, 0)])
def test_a_step_in_another_order_gathers_late_and_is_right(tower: Any, order: tuple[int, ...]) -> None:
    """Behind the first deviation each gather is issued when needed; every layer is full when it computes (`Noted`
    asserts it), every gradient is reduced, and nothing stays full or in flight.
    """
    traced(tower)
    lines = traced(tower, order)
    assert [line for line in lines if line.startswith("= ")] == [f"= layers.{i}" for i in order]
    forward = lines[: lines.index("> pre_backward root")]
    same = len(os.path.commonprefix([order, tuple(range(BLOCKS))]))
    for position, line in enumerate(forward):
        began = sum(earlier.startswith("> pre_forward layers.") for earlier in forward[:position])
        if line.startswith("unshard layers.") and began > same:
            assert forward[position + 1] == line.replace("unshard", "wait")
    # At most one guess was wrong: the one that was issued before the deviation.
    gathered = {line.removeprefix("unshard ") for line in forward if line.startswith("unshard ")}
    assert gathered - {"root", *map(layer, order)} <= {layer(same)}
    assert sorted(line for line in lines if line.startswith("reduce ")) == sorted(
        f"reduce {name}" for name in {"root", *map(layer, order)}
    )
    unit = unit_of(tower)
    assert unit is not None and unit.root is not None
    assert all(unit.record.full is Full.SHARDED for unit in unit.root.units)
    # And the step after it follows what this one did.
    assert during(traced(tower, order), "pre_forward root")[-1] == f"unshard layers.{order[0]}"


def test_what_a_wrong_guess_gathered_is_not_used_after_an_update(tower: Any) -> None:
    """An evaluation that ends early leaves a gather in flight. The shards change: what travels is what was."""
    traced(tower, train=False)
    traced(tower, (0,), train=False)
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter.mul_(2)
    lines = traced(tower, train=False)
    assert "unshard layers.1" in lines and lines.index("unshard layers.1") < lines.index("wait layers.1")


# ---- what the user says --------------------------------------------------------------------------------------


@behaviour(
    "`set_modules_to_forward_prefetch` takes effect",
    area="prefetch",
    torch="none",
    reason="seen in fullshard's trace; values are compared",
)
def test_a_forward_list_takes_effect(tower: Any) -> None:
    """From the first step on, in its order, for as many as it names."""
    layers = list(tower.layers)
    layers[0].set_modules_to_forward_prefetch([layers[2], layers[1]])
    lines = traced(tower)
    assert during(lines, "pre_forward layers.0") == [
        "unshard layers.0",
        "wait layers.0",
        "unshard layers.2",
        "unshard layers.1",
    ]
    assert during(lines, "pre_forward layers.1") == ["wait layers.1"]
    lines = traced(tower)
    assert during(lines, "pre_forward root") == ["unshard root", "wait root", "unshard layers.0"]
    assert during(lines, "pre_forward layers.0") == ["wait layers.0", "unshard layers.2", "unshard layers.1"]
    assert during(lines, "pre_forward layers.2") == ["wait layers.2", "unshard layers.3"]


@behaviour(
    "`set_modules_to_backward_prefetch` takes effect",
    area="prefetch",
    torch="none",
    reason="seen in fullshard's trace; values are compared",
)
def test_a_backward_list_takes_effect(tower: Any) -> None:
    """In the place of the recorded order, for the module that has one."""
    layers = list(tower.layers)
    layers[3].set_modules_to_backward_prefetch([layers[1], layers[2]])
    lines = traced(tower)
    assert during(lines, "pre_backward layers.3") == ["wait layers.3", "unshard layers.1", "unshard layers.2"]
    assert during(lines, "pre_backward layers.2") == ["wait layers.2"]
    assert during(lines, "pre_backward layers.1") == ["wait layers.1", "unshard layers.0"]


@use_options(prefetch_depth=0)
def test_prefetch_0_gathers_when_needed(tower: Any) -> None:
    """In forward. Backward is not concerned, and the user's lists are still obeyed."""
    tower.layers[2].set_modules_to_forward_prefetch([tower.layers[3]])
    for _ in range(2):
        lines = traced(tower)
        assert during(lines, "pre_forward root") == ["unshard root", "wait root"]
        for i in (0, 1):
            assert during(lines, f"pre_forward layers.{i}") == [f"unshard layers.{i}", f"wait layers.{i}"]
        assert during(lines, "pre_forward layers.2") == ["unshard layers.2", "wait layers.2", "unshard layers.3"]
        assert during(lines, "pre_backward layers.3") == ["wait layers.3", "unshard layers.2"]


@use_options(prefetch_depth=2)
def test_prefetch_2_gathers_two_ahead(tower: Any) -> None:
    """Each layer once, two before it is needed."""
    traced(tower)
    lines = traced(tower)
    assert during(lines, "pre_forward root") == ["unshard root", "wait root", "unshard layers.0", "unshard layers.1"]
    assert during(lines, "pre_forward layers.0") == ["wait layers.0", "unshard layers.2"]
    assert during(lines, "pre_forward layers.2") == ["wait layers.2"]


@behaviour(
    "`set_memory_budget(prefetch=)` limits what is gathered ahead, in forward and in backward",
    area="prefetch",
    torch="none",
    reason="not in torch, where lists of modules are the only dial",
)
def test_bytes_limit_what_is_gathered_ahead(tower: Any) -> None:
    """A layer of (3, 3) on four ranks: 12 elements with padding, in memory for 16."""
    nbytes = 4 * 16
    traced(tower)
    tower.set_memory_budget(prefetch=0)
    lines = traced(tower)
    for i in range(BLOCKS):
        assert during(lines, f"pre_forward layers.{i}") == [f"unshard layers.{i}", f"wait layers.{i}"]
        assert during(lines, f"pre_backward layers.{i}") == [f"unshard layers.{i}", f"wait layers.{i}"]
    tower.set_memory_budget(prefetch=2 * nbytes)
    lines = traced(tower)
    assert during(lines, "pre_forward root") == ["unshard root", "wait root", "unshard layers.0", "unshard layers.1"]
    assert during(lines, "pre_forward layers.0") == ["wait layers.0", "unshard layers.2"]
    assert during(lines, "pre_backward root") == ["unshard layers.3", "unshard layers.2"]
    assert during(lines, "pre_backward layers.3") == ["wait layers.3", "unshard layers.1"]
    tower.set_memory_budget(prefetch=2 * nbytes - 1)
    assert during(traced(tower), "pre_backward layers.3") == ["wait layers.3", "unshard layers.2"]
    tower.set_memory_budget(prefetch=1 << 30)
    lines = traced(tower)
    assert [line for line in during(lines, "pre_forward root") if "layers" in line] == [
        f"unshard layers.{i}" for i in range(BLOCKS)
    ]
    tower.set_memory_budget(prefetch=None)
    assert during(traced(tower), "pre_forward layers.0") == ["wait layers.0", "unshard layers.1"]


def test_a_limit_in_bytes_is_of_the_root(tower: Any) -> None:
    """Said below it, it would do nothing: an error, before and after the root is known."""
    layer = tower.layers[0]
    layer.set_memory_budget(prefetch=100)
    with pytest.raises(RuntimeError, match="it was called on FSDPNoted below FSDPTower; call it on the root"):
        traced(tower)
    layer.set_memory_budget(prefetch=None)
    traced(tower)
    with pytest.raises(RuntimeError, match=r"found layers.0 below it; call it on the root"):
        layer.set_memory_budget(prefetch=100)


def test_more_backwards_may_be_announced_before_the_first_forward(tower: Any) -> None:
    """`set_is_last_backward(False)` holds from where it was said: what the first backward did not use is kept."""
    tower.set_is_last_backward(False)
    first, second = tower(torch.arange(3)).sum(), tower(torch.arange(3)).sum()
    second.backward()
    with record(tower) as trace:
        tower.set_is_last_backward(True)
        first.backward()
    lines = [line.strip() for line in trace.lines]
    assert during(lines, "pre_backward layers.3") == ["wait layers.3", "unshard layers.2"]


def test_a_guess_may_outlive_a_backward_that_is_not_the_last() -> None:
    """layers.1 is gathered for nothing: kept while more backwards follow, dropped by the last. The check accepts it."""
    with fake_world(2):
        model = models.side(fully_shard, True)
        loss, _ = model(torch.arange(3))
        loss.sum().backward()
        model.set_is_last_backward(False)
        loss, _ = model(torch.arange(3))
        with record(model) as trace:
            loss.sum().backward()
            model.set_is_last_backward(True)
            loss, _ = model(torch.arange(3))
            loss.sum().backward()
    assert ("cancel", "layers.1") in trace.commands


def test_recomputation_that_is_cut_short_leaves_the_recorded_order() -> None:
    """One checkpoint around two layers, of which the loss reaches the first: a good step, whose order is the plan of
    the next one.
    """

    class Pair(Tower):
        def forward(self, tokens: Tensor, order: Sequence[int] = ()) -> Tensor:
            def both(x: Tensor) -> tuple[Tensor, Tensor]:
                first = self.layers[0](x)
                return first, self.layers[1](first)

            first, _ = checkpoint(both, self.embed(tokens), use_reentrant=False)
            return self.head(first)

    with fake_world(2):
        model: Any = Pair()
        for module in model.layers:
            fully_shard(module)
        fully_shard(model)
        for _ in range(3):
            lines = traced(model)
            assert not [line for line in lines if "reset" in line]
        assert during(lines, "pre_forward root")[-1] == "unshard layers.0"
