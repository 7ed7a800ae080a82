"""Figures that the engine itself computes: its layouts, its rules in a recorded step, its ledger."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.figures.draw import Picture, bars
from fullshard import MixedPrecisionPolicy, fully_shard
from fullshard.layout import FlatLayout, ShardLayout
from fullshard.observe import record
from fullshard.policy import Wanted, resolve_precision

RANKS = ("blue", "orange", "green", "purple")

# ---- layouts -------------------------------------------------------------------------------------------------


def rows() -> Picture:
    """The rows of three parameters that each of four ranks owns."""
    shapes = {"weight (8, 6)": (8, 6), "weight (5, 6)": (5, 6), "bias (6,)": (6,)}
    picture = Picture(760, 330, "Which rows of a parameter each of four ranks owns")
    picture.text(16, 26, "Which rows each of four ranks owns", bold=True, size=15)
    picture.legend(16, 50, [(RANKS[r], f"rank {r}") for r in range(4)] + [("pale", "padding, in messages only")])
    x = 30.0
    for name, shape in shapes.items():
        columns = shape[1] if len(shape) > 1 else 1
        picture.text(x, 82, name)
        y = 94.0
        layout = ShardLayout(shape, world=4)
        for rank in range(4):
            for row in range(layout.padded_rows):
                real = row < layout.rows(rank)
                for column in range(columns):
                    colour = RANKS[rank] if real else "pale"
                    picture.box(x + 24 * column, y, 22, 22, colour, f"rank {rank}, row {layout.start(rank) + row}")
                y += 24
            y += 4
        x += 24 * columns + 90
    picture.text(
        16,
        316,
        "Computed by layout/shard.py: as torch.chunk, so that every rank but the last ones has as many rows.",
        "quiet",
        size=12,
    )
    return picture


def flat() -> Picture:
    """One rank's flat buffer of a block, by parameter."""
    block = {
        "attention_norm": (512,),
        "q": (512, 512),
        "k": (512, 512),
        "v": (512, 512),
        "out": (512, 512),
        "mlp_norm": (512,),
        "gate": (1368, 512),
        "up": (1368, 512),
        "down": (512, 1368),
    }
    world = 4
    layout = FlatLayout.build([ShardLayout(s, world=world) for s in block.values()], 8, names=tuple(block))
    picture = Picture(760, 230, "One rank's flat buffer, and what a gather makes of it")
    picture.text(16, 26, "A block's nine parameters on one of four ranks: one flat buffer", bold=True, size=15)
    palette = ("grey", "blue", "teal", "green", "purple", "grey", "orange", "red", "teal")
    scale = 728 / layout.padded_local_numel

    def strip(y: float, height: float, scale: float, x0: float, label: bool) -> None:
        for number, index in enumerate(layout.order):
            segment = layout.segments[index]
            width = scale * segment.padded_numel
            picture.box(x0 + scale * segment.offset, y, width, height, palette[number], str(segment), round_=1)
            if label and width > 40:
                picture.on(x0 + scale * (segment.offset + segment.padded_numel / 2), y + 23, segment.name)

    strip(50, 36, scale, 16, True)
    picture.text(
        16,
        104,
        f"shard of this rank: {layout.padded_local_numel:,} elements; norms are the two thin lines",
        "quiet",
        size=12,
    )
    picture.text(16, 146, "gathered: the buffers of all four, in rank order", size=13)
    for rank in range(world):
        strip(158, 30, scale / world, 16 + rank * 728 / world, False)
        picture.text(16 + (rank + 0.5) * 728 / world, 206, f"rank {rank}", "quiet", at="middle", size=12)
    picture.text(744, 146, f"{layout.gathered_numel:,} elements", "quiet", at="end", size=12)
    return picture


def meshes() -> Picture:
    """Which shard of a parameter each of eight ranks holds, by mesh."""
    picture = Picture(760, 350, "Which part of a parameter each of eight ranks holds")
    picture.text(16, 26, "Which part of an (8, 8) weight each of eight ranks holds", bold=True, size=15)
    eight = ("blue", "orange", "green", "purple", "red", "teal", "grey", "blue")

    def slices(world: int) -> list[range]:
        layout = ShardLayout((8, 8), world=world)
        return [range(layout.start(rank), layout.start(rank) + layout.rows(rank)) for rank in range(world)]

    def weight(x: float, y: float, cells: set[tuple[int, int]], colour: str, label: str) -> None:
        for row in range(8):
            for column in range(8):
                picture.box(x + 7 * column, y + 7 * row, 6, 6, colour if (row, column) in cells else "pale", round_=0)
        picture.text(x + 28, y + 72, label, "quiet", at="middle", size=11)

    def part(rows: range, columns: Sequence[int] = range(8)) -> set[tuple[int, int]]:
        return {(row, column) for row in rows for column in columns}

    lines = [
        ("mesh (8,): shard", [part(one) for one in slices(8)]),
        ("mesh (2, 4): replicate x shard (HSDP)", [part(one) for _ in range(2) for one in slices(4)]),
        ("mesh (4, 2): shard x tensor parallel", [part(one, slices(2)[tp]) for one in slices(4) for tp in range(2)]),
    ]
    y = 46
    for title, parts in lines:
        picture.text(16, y + 8, title, size=12)
        seen: list[set[tuple[int, int]]] = []
        for rank, cells in enumerate(parts):
            if cells not in seen:
                seen.append(cells)
            weight(26 + 90 * rank, y + 18, cells, eight[seen.index(cells)], f"rank {rank}")
        y += 100
    return picture


# ---- recorded steps ------------------------------------------------------------------------------------------


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(4))
        self.head = nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return torch.as_tensor(self.head(x))


@contextmanager
def _fake_ranks(world: int) -> Iterator[None]:
    """This process is rank 0 of `world`; messages cost nothing and carry nothing, the order is the engine's."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    excepthook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = excepthook


@cache
def recorded(reshard: bool | int, step: int) -> tuple[str, ...]:
    """The trace of this step of four layers and a root on four ranks."""
    with _fake_ranks(4):
        model: Any = Layers()
        for layer in model.layers:
            fully_shard(layer, reshard_after_forward=reshard)
        fully_shard(model)
        for _ in range(step - 1):
            model(torch.ones(1, 16)).sum().backward()
        with record(model) as trace:
            model(torch.ones(1, 16)).sum().backward()
    return tuple(trace.lines)


STATES = {"arriving": "orange", "full": "blue", "secondary shard kept": "purple", "gradients under way": "green"}
_AFTER = {
    "unshard": "arriving",
    "unshard_secondary": "arriving",
    "wait": "full",
    "reshard": "",
    "reshard_secondary": "secondary shard kept",
    "cancel": "",
}


def states(lines: Sequence[str]) -> tuple[list[str], dict[str, list[tuple[str, bool]]]]:
    """The events of a trace, and for each unit (state, gradients under way) after each of them."""
    events: list[str] = []
    now: dict[str, tuple[str, bool]] = {}
    history: list[dict[str, tuple[str, bool]]] = []
    for line in lines:
        if line.startswith("> "):
            events.append(" ".join(line.split()[1:3]))
            history.append(dict(now))
            continue
        command, unit = line.split()
        state, sending = now.get(unit, ("", False))
        if command in _AFTER:
            state = _AFTER[command]
        elif command == "reduce":
            sending = True
        elif command == "finish":
            now = {name: (each, False) for name, (each, _) in now.items()}
            sending, state = False, now.get(unit, ("", False))[0]
        now[unit] = (state, sending)
        history[-1] = dict(now)
    units = sorted({unit for each in history for unit in each}, key=lambda unit: (unit == "root", unit))
    return events, {unit: [each.get(unit, ("", False)) for each in history] for unit in units}


def _strips(picture: Picture, lines: Sequence[str], y: float, left: float = 90, width: float = 650) -> float:
    """Draws one lane for each unit, and above them what computes; the y below."""
    events, units = states(lines)
    keep = [i for i, event in enumerate(events) if not event.startswith("inputs_reached")]
    step = width / len(keep)
    for place, i in enumerate(keep):
        word, unit = events[i].split()
        if word in ("pre_forward", "pre_backward") and unit != "root":
            way = "F" if word == "pre_forward" else "B"
            picture.text(left + step * (place + 0.5), y - 4, f"{way}{unit[-1]}", "quiet", at="middle", size=11)
    for unit, history in units.items():
        picture.text(left - 8, y + 13, unit, at="end", size=12)
        picture.box(left, y, width, 17, "pale", "sharded")
        for place, i in enumerate(keep):
            state, sending = history[i]
            if state:
                picture.box(
                    left + step * place,
                    y,
                    step + 0.5,
                    17,
                    STATES[state],
                    f"{unit}: {state} after {events[i]}",
                    round_=0,
                )
            if sending:
                hint = f"{unit}: gradients under way after {events[i]}"
                picture.box(left + step * place, y + 12, step + 0.5, 5, STATES["gradients under way"], hint, round_=0)
        y += 21
    return y


def _steps_picture(title: str, parts: Sequence[tuple[str, Sequence[str]]], used: Sequence[str]) -> Picture:
    picture = Picture(760, 66 + 144 * len(parts), title)
    picture.text(16, 26, title, bold=True, size=15)
    picture.legend(16, 50, [*((STATES[state], state) for state in used), ("pale", "sharded")])
    y = 74.0
    for words, lines in parts:
        picture.text(16, y + 4, words, size=12)
        y = _strips(picture, lines, y + 24) + 15
    return picture


def life() -> Picture:
    return _steps_picture(
        "What is sharded when: one step of four units and a root",
        [
            (
                "F: forward, B: backward of the unit that computes; time goes to the right, event by event",
                recorded(True, 2),
            )
        ],
        ["arriving", "full", "gradients under way"],
    )


def level_states() -> Picture:
    return _steps_picture(
        "What stays full between forward and backward",
        [
            ("reshard_after_forward=True (ZeRO-3)", recorded(True, 2)),
            ("reshard_after_forward=False (ZeRO-2)", recorded(False, 2)),
            ("reshard_after_forward=2 (hpZ): a part stays, and is gathered from the neighbour", recorded(2, 2)),
        ],
        list(STATES),
    )


def order() -> Picture:
    return _steps_picture(
        "The first step records the order; from the second on, gathers run ahead",
        [
            ("step 1: each unit is gathered when it is needed, and waited for", recorded(True, 1)),
            ("step 2: the next unit arrives while this one computes", recorded(True, 2)),
        ],
        ["arriving", "full", "gradients under way"],
    )


# ---- precision -----------------------------------------------------------------------------------------------


def precision() -> Picture:
    """The dtypes of a gradient's way, by policy."""
    half, single = torch.bfloat16, torch.float32
    policies = [
        ("float32 throughout", MixedPrecisionPolicy(), single),
        ("param_dtype=bf16", MixedPrecisionPolicy(half), single),
        ("param_dtype=bf16, reduce_dtype=bf16", MixedPrecisionPolicy(half, half), single),
        ("a bfloat16 model, reduce_dtype=fp32", MixedPrecisionPolicy(reduce_dtype=single), half),
    ]
    stages = [
        ("storage", "shard, state"),
        ("compute", "full, autograd"),
        ("wire", "exchanged"),
        ("reduce", "accumulated"),
        ("sum", "added in"),
        ("gradient", ".grad"),
    ]
    picture = Picture(760, 84 + 40 * len(policies), "Dtypes of a parameter and of its gradient, by policy")
    picture.text(16, 26, "Dtypes of a parameter and of its gradient, by policy", bold=True, size=15)
    for number, (_, words) in enumerate(stages):
        x = 262 + 82 * number
        picture.text(x + 38, 50, words, "quiet", at="middle", size=12)
    for row, (name, policy, storage) in enumerate(policies):
        y = 62 + 40 * row
        picture.text(250, y + 20, name, at="end", size=12)
        found = resolve_precision(Wanted(policy.param_dtype, policy.reduce_dtype), storage)
        for number, (field, _) in enumerate(stages):
            dtype: torch.dtype = getattr(found, field)
            x = 262 + 82 * number
            wide = 76 if dtype.itemsize == 4 else 38
            picture.box(x + 38 - wide / 2, y, wide, 30, "blue" if dtype.itemsize == 4 else "orange", str(dtype))
            picture.on(x + 38, y + 20, "fp32" if dtype == single else "bf16")
    picture.text(
        16, 74 + 40 * len(policies), "Width: bytes per element. Resolved by policy/options.py.", "quiet", size=12
    )
    return picture


# ---- the ledger ----------------------------------------------------------------------------------------------

TERMS = {
    "parameters": "blue",
    "optimizer": "purple",
    "gradients": "orange",
    "full parameters": "teal",
    "messages": "red",
    "activations": "green",
    "other": "grey",
}
_OF = {
    "gradients of shards": "gradients",
    "held gradients": "gradients",
    "kept parts": "full parameters",
    "staging": "messages",
    "loss": "activations",
}


@cache
def _planner() -> Any:
    """Plans of an 8B model on H100s, sequences of 4,096 tokens."""
    from fullshard.plan import Planner, find_hardware
    from fullshard.plan.facts import describe
    from fullshard.train import shapes

    def described(samples: int, sequence: int | None, compute: str, alone: bool, recompute: Any) -> Any:
        program = shapes.named("llama-8b", sequence)
        sizes: dict[str, Any] = {"samples": samples, "compute": compute, "alone": alone}
        return describe(program, "llama-8b", recompute=recompute, **sizes)

    return Planner(described, find_hardware("h100-80g"), sequence=4096)


def _plan(**dials: Any) -> Any:
    from fullshard.plan import Strategy

    return _planner().plan(Strategy(compute="bfloat16", reduce="float32", recompute="whole", **dials))


def _terms(plan: Any) -> list[tuple[str, float]]:
    """The terms of the peak in GB, by the kinds of `TERMS`."""
    found = dict.fromkeys(TERMS, 0.0)
    for name, nbytes in plan.terms:
        kind = _OF.get(name, name)
        found[kind if kind in TERMS else "other"] += nbytes / 1e9
    return list(found.items())


def levels_memory() -> Picture:
    plans = [
        ("replicate (as DDP)", _plan(ranks=8, replicas=8)),
        ("ZeRO-2: reshard=False", _plan(ranks=8, reshard=False)),
        ("hpZ: reshard=2", _plan(ranks=8, reshard=2)),
        ("HSDP: 2 x 4", _plan(ranks=8, replicas=2)),
        ("ZeRO-3: reshard=True", _plan(ranks=8)),
    ]
    return bars(
        "Llama-8B on 8 devices: what the peak of one is made of, predicted",
        [(name, _terms(plan)) for name, plan in plans],
        TERMS,
        unit="GB",
        note="By fullshard plan: bfloat16 compute, float32 shards, AdamW, one sequence of 4,096 tokens, recomputed.",
    )


def memory_ranks() -> Picture:
    return bars(
        "Llama-8B, ZeRO-3: the peak of one rank by their number, predicted",
        [
            (f"{ranks} ranks" if ranks > 1 else "1 rank", _terms(_plan(ranks=ranks)))
            for ranks in (1, 2, 4, 8, 16, 64, 256)
        ],
        TERMS,
        unit="GB",
        left=100,
        note="By fullshard plan, as above: what is sharded shrinks with the ranks, what one unit needs stays.",
    )


def memory_step() -> Picture:
    """Bytes of one rank over a step of the 8B model, by kind."""
    plan = _plan(ranks=8)
    from fullshard.plan.account import KINDS

    moments = plan.simulated.moments
    picture = Picture(760, 400, "Memory of one rank over a step")
    picture.text(16, 26, "Llama-8B on 8 devices: memory of one rank over a step, predicted", bold=True, size=15)
    names = list(TERMS.items())
    picture.legend(16, 50, [(colour, kind) for kind, colour in names])
    stacks: list[dict[str, float]] = []
    for moment in moments:
        stack = dict.fromkeys(TERMS, 0.0)
        for kind, nbytes in zip(KINDS, moment.nbytes, strict=True):
            name = _OF.get(kind, kind)
            stack[name if name in TERMS else "other"] += nbytes / 1e9
        stacks.append(stack)
    most = 1.05 * max(sum(stack.values()) for stack in stacks)
    end = moments[-1].seconds
    left, top, width, height = 60, 90, 680, 260
    slots = 170
    for slot in range(slots):  # the largest moment of each slot
        begin, stop = end * slot / slots, end * (slot + 1) / slots
        inside = [i for i, moment in enumerate(moments) if begin <= moment.seconds < stop]
        before = max((i for i, moment in enumerate(moments) if moment.seconds <= begin), default=0)
        chosen = max([*inside, before], key=lambda i: sum(stacks[i].values()))
        y = float(top + height)
        for kind, colour in names:
            tall = height * stacks[chosen][kind] / most
            if tall > 0.1:
                y -= tall
                picture.box(left + width * slot / slots, y, width / slots + 0.5, tall, colour, round_=0)
    for share in range(5):
        y = top + height * (1 - share / 4)
        picture.text(left - 8, y + 4, f"{most * share / 4:.0f} GB", "quiet", at="end", size=11)
        picture.line(left, y, left + width, y, "pale")
    begins: dict[str, float] = {}
    for moment in moments:
        begins.setdefault(moment.phase.split()[0], moment.seconds)
    for phase, seconds in begins.items():
        if phase in ("forward", "backward"):
            x = left + width * seconds / end
            picture.line(x, top, x, top + height + 8, dashed=True)
            picture.text(x + 3, top + height + 18, phase, "quiet", size=12)
    picture.text(
        16,
        390,
        "By fullshard plan: bfloat16 compute, float32 shards, AdamW, one sequence of 4,096 tokens, recomputed.",
        "quiet",
        size=12,
    )
    return picture
