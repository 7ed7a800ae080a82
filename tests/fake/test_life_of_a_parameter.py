"""docs/life-of-a-parameter.md says what happens: its table, its numbers and its trace are rebuilt from a real step.

The step runs on a fake group, once as each of four ranks. `_Observer` looks at the parameter after the commands of each
event that concern it were executed.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import fully_shard, report
from fullshard.engine import Executor, unit_of
from fullshard.observe import record
from fullshard.schedule import Command, Event, rules
from fullshard.schedule import record as records
from tests.harness.fake import fake_world

DOCUMENT = (Path(__file__).parents[2] / "docs" / "life-of-a-parameter.md").read_text()
(PROGRAM,) = re.findall(r"^```python\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)
WORLD = 4
SHAPE = (5, 3)
UNIT = "layers.0"

# Who decided, for each command in each event. That these functions and rules are there, a test below asks.
DECIDED = {
    ("pre_forward", "unshard"): "`next_in_forward` [R3]",
    ("pre_forward", "wait"): "`pre_forward` [R16]",
    ("post_forward", "reshard"): "`post_forward` [R5]",
    ("pre_backward", "unshard"): "`next_in_backward` [R9]",
    ("pre_backward", "wait"): "`pre_backward` [R16]",
    ("grads_ready", "reshard"): "`grads_ready` [R17], [R18]",
    ("backward_end", "finish"): "`backward_end`",
}


class Model(nn.Module):
    """The one of the document."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, SHAPE[1])
        self.layers = nn.ModuleList([nn.Linear(3, 5, bias=False), nn.Linear(5, 3, bias=False)])
        self.head = nn.Linear(3, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Row(NamedTuple):
    """The table's columns as one rank sees them; `rows` and `grad_rows` are put together for all ranks."""

    moment: str
    module: str
    rows: int
    shard: str
    full: str
    gradient: str
    grad_rows: int
    decided: str
    done: str


class _Observer:
    """Notes a `Row` whenever something happened to the parameter."""

    def __init__(self, model: Any) -> None:
        self.model, self.module = model, model.layers[0]
        self.rows: list[Row] = []
        self._before = self._local().clone()

    def watch_engine(self) -> None:
        """From now on, look after each event's commands."""
        unit = unit_of(self.model)
        assert unit is not None and unit.root is not None
        self.executor = unit.root.executor
        unit.root.event_listeners.append(self._event)
        self._run, self.executor.run = self.executor.run, self._run_and_look  # type: ignore[method-assign]

    def _event(self, event: Event) -> None:
        self._happened = event

    def _run_and_look(self, commands: Sequence[Command]) -> None:
        self._run(commands)
        kinds = [command.kind for command in commands if command.unit.name == UNIT or command.kind == "finish"]
        if kinds:
            event = self._happened
            done = ", ".join(f"`{kind}`" for kind in kinds)
            self.look(f"> {event.kind} {event.unit}", DECIDED[event.kind, kinds[0]], done)

    def _param(self) -> Any:
        unit = unit_of(self.module)
        assert unit is not None
        return unit.params[0]

    def _local(self) -> Tensor:
        return self._param().sharded.to_local().detach()

    def look(self, moment: str, decided: str, done: str) -> None:
        """Note what stands where now."""
        weight, param = self.module.weight, self._param()
        local = self._local()
        if not self.rows:
            shard = "made"
        else:
            shard = "kept" if torch.equal(local, self._before) else "written"
        self._before = local.clone()
        (info,) = [info for info in report(self.model).units if info.name == UNIT]
        full = f"{info.full_nbytes_live} bytes"
        if info.full_nbytes_live and isinstance(weight, DTensor):
            full += ", arriving"
        gradient, grad_rows = "none", 0
        if isinstance(param.sharded.grad, DTensor):
            gradient, grad_rows = "`.grad`", param.sharded.grad.to_local().shape[0]
        elif any(flight.group is unit_of(self.module).groups[0] for flight in self._in_flight()):  # type: ignore[union-attr]
            gradient = "being sent"
        assert tuple(weight.shape) == SHAPE
        assert param.gradients.fresh is param.gradients.held is param.gradients.reduced is None
        on_module = "DTensor" if isinstance(weight, DTensor) else f"plain {SHAPE}"
        self.rows.append(Row(f"`{moment}`", on_module, local.shape[0], shard, full, gradient, grad_rows, decided, done))

    def _in_flight(self) -> Sequence[Any]:
        return self.executor.shared.in_flight if hasattr(self, "executor") else ()


def live(rank: int) -> tuple[list[Row], str]:
    """The second step as `rank`: what became of the parameter, and what the document's program prints."""
    tokens = torch.arange(4)
    with fake_world(WORLD, rank):
        model: Any = Model()
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        observer = _Observer(model)
        observer.look(f"fully_shard({UNIT})", "`ShardLayout`", "`ParamGroup`")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(tokens).sum().backward()
        optimizer.zero_grad()
        observer.watch_engine()
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(PROGRAM, {"model": model, "tokens": tokens})
        for parameter in model.parameters():
            # What a fake group reduces to means nothing; this is a gradient that changes the shard.
            parameter.grad.to_local().fill_(1.0)
        optimizer.step()
        observer.look("optimizer.step()", "you", "torch")
        optimizer.zero_grad()
        observer.look("optimizer.zero_grad()", "you", "torch")
    return observer.rows, printed.getvalue()


def documented(heading: str) -> list[list[str]]:
    """The cells of the table whose first column has this heading."""
    lines = DOCUMENT.splitlines()
    (start,) = [i for i, line in enumerate(lines) if line.startswith(f"| {heading} |")]
    found = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


@pytest.fixture(scope="module")
def lives() -> list[tuple[list[Row], str]]:
    """The step as each rank lives it, with the default settings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FULLSHARD_CHECK", "1")
        return [live(rank) for rank in range(WORLD)]


def test_the_table_is_what_happens(lives: list[tuple[list[Row], str]]) -> None:
    """Row by row; what is not a number of rows is the same on every rank."""
    table = []
    for same in zip(*(rows for rows, _ in lives), strict=True):
        first = same[0]
        shards = {row.shard for row in same if row.rows}
        assert len(shards) == 1, "a rank that owns no rows has nothing to write"
        assert len({row._replace(rows=0, grad_rows=0, shard="") for row in same}) == 1
        by_rank = ", ".join(str(row.rows) for row in same)
        shard = shards.pop().replace("made", f"{by_rank} rows")
        grads = ", ".join(str(row.grad_rows) for row in same)
        gradient = first.gradient + (f": {grads} rows" if first.gradient == "`.grad`" else "")
        table.append([first.moment, first.module, shard, first.full, gradient, first.decided, first.done])
    assert documented("moment") == table


def test_the_trace_is_what_is_printed(lives: list[tuple[list[Row], str]]) -> None:
    """The document's program, run; every rank prints the same."""
    blocks = re.findall(r"^```text\n(> .*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)
    assert [[block] for block in blocks] == [sorted({printed for _, printed in lives})]


def test_the_functions_and_rules_that_are_named_exist() -> None:
    """A function of the rules (with what it calls there) or of the prefetch order, and the numbers in it."""
    helpers = "".join(
        inspect.getsource(getattr(rules, name))
        for name in ("_make_full", "_end_use", "_unshard_ahead", "_hand_over", "_send")
    )
    for _, _, _, _, _, decided, done in documented("moment")[1:-2]:
        name = re.findall(r"`(\w+)`", decided)[0]
        owner = records if hasattr(records, name) and name.startswith("next_") else rules
        source = inspect.getsource(getattr(owner, name))
        if owner is records:
            source = inspect.getsource(rules)
            assert name in source
        for number in re.findall(r"\[R\d+\]", decided):
            assert number in source + helpers, f"{decided}: {number} is not in {name}"
        for command in re.findall(r"`(\w+)`", done):
            assert hasattr(Executor, f"_{command}")


def test_the_bytes_are_those_of_the_layout() -> None:
    """Each sum of the document, from the pack of the unit."""
    with fake_world(WORLD):
        unit = unit_of(fully_shard(nn.Linear(3, 5, bias=False)))
        assert unit is not None
        (group,) = unit.groups
    pack, layout, itemsize = group.pack, group.params[0].layout, 4
    assert (
        f"A rank's flat buffer has {pack.padded_local_numel * itemsize} bytes: {layout.padded_rows} rows of" in DOCUMENT
    )
    assert layout.rows(WORLD - 1) == 0
    own, rows = layout.numel * itemsize, layout.padding_numel * itemsize
    alignment = (pack.full_numel - layout.padded_full_numel) * itemsize
    text = (
        f"The full parameter has {pack.full_numel * itemsize} bytes: {own} of its own, {rows} of the rows that pad it "
        f"to {WORLD} times {layout.padded_rows}, and {alignment} of alignment."
    )
    assert text in DOCUMENT


# ---- other lives ---------------------------------------------------------------------------------------------


def lines_of(world: int = WORLD, *, steps: int = 1, train: bool = True, sync: bool = True, **options: Any) -> list[str]:
    """The lines of the last of some steps; `options` are those of `fully_shard`."""
    tokens = torch.arange(4)
    with fake_world(world):
        model: Any = Model()
        for layer in model.layers:
            fully_shard(layer, **options)
        fully_shard(model, **options)
        model.set_requires_gradient_sync(sync)
        for _ in range(steps):
            with record(model) as trace, torch.set_grad_enabled(train):
                loss = model(tokens).sum()
                assert world > 1 or not any(info.full_nbytes_live for info in report(model).units)
                if train:
                    loss.backward()
    return [line.strip() for line in trace.lines]


def test_the_other_lives_are_as_they_are_told() -> None:
    """One statement of the last table after another."""
    told = {when: what for when, what in documented("when")}
    assert len(told) == 7

    lines = lines_of()
    start = lines.index("> pre_forward layers.0")
    assert lines[start + 1 : start + 3] == ["unshard layers.0", "wait layers.0"]

    with fake_world(WORLD):
        unit = unit_of(fully_shard(nn.Linear(3, 5)))
        assert unit is not None and unit.groups[0].plan.packed == (0, 1)

    lines = lines_of(reshard_after_forward=False)
    backward = lines.index("> pre_backward root")
    assert "reshard layers.0" not in lines[:backward] and "unshard layers.0" not in lines[backward:]
    lines = lines_of()
    backward = lines.index("> pre_backward root")
    assert "reshard root" not in lines[:backward] and "unshard root" not in lines[backward:]

    assert {"shelve layers.0", "shelve root"} <= set(lines_of(train=False, reshard_after_forward=False))
    assert "reshard root" in lines_of(train=False) and "shelve root" not in lines_of(train=False)

    lines = lines_of(sync=False)
    assert "accumulate layers.0" in lines and not [line for line in lines if line.startswith("reduce")]

    assert "unshard layers.0" in lines_of(world=1), "the commands are the same; what they cost is checked in lines_of"

    with fake_world(WORLD):
        model: Any = Model()
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        with pytest.raises(IndexError):
            model(torch.tensor([99]))
        with record(model) as trace:
            model(torch.arange(4))
    assert trace.lines[0] == "> reset root"
    assert {line.split()[0] for line in trace.lines[1 : trace.lines.index("> pre_forward root")]} == {
        "reshard",
        "reset",
    }


def test_the_document_fits_on_a_page() -> None:
    """Two minutes of a newcomer's ten."""
    assert DOCUMENT.count("\n") <= 120
