"""How a model is sharded and trained, as a value; and what that makes of each unit: its layouts and its messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from ..layout import (
    FlatLayout,
    GatherPlan,
    HostGroups,
    ShardLayout,
    UnitMemory,
    Ways,
    align_numel,
    direct_gradients,
    direct_indices,
    exchanges_gradients,
    groups_messages,
    itemsize,
    plan_gather,
    secondary_layout,
)
from .description import Model, Parameter, UnitShape
from .hosts import numbered
from .recomputation import NONE, RECOMPUTATIONS, is_on_host, is_way, on_host, without_host

# As `api/fully_shard.py` has it: full parameters of this many bytes travel by themselves where messages are grouped.
DIRECT_GATHER_NBYTES = 1 << 20


class Optimizer(NamedTuple):
    """The memory that an optimizer has and makes. Of each parameter: `copies` in its dtype, `nbytes` more for each
    element, and `counter` bytes for the number of its steps. A step makes `results` of the size of a shard, for one
    parameter after the other, or of all shards where `lists`. `counted`: a test compares it with what torch's class
    holds."""

    copies: int
    nbytes: float = 0.0
    counter: int = 0
    results: int = 0
    lists: bool = False
    counted: bool = True


# 8-bit Adam has two bytes of state for each element, and two numbers of 4 bytes for each block of 256 elements. Adam
# makes the square root of the second moment and its quotient, as a list the root alone.
OPTIMIZERS = {
    "adamw": Optimizer(2, counter=4, results=2),
    "adamw-foreach": Optimizer(2, counter=4, results=1, lists=True),
    "adam": Optimizer(2, counter=4, results=2),
    "adamw8bit": Optimizer(0, 2.0 + 2 * 4 / 256, counter=4, results=2, counted=False),
    "sgd": Optimizer(0),
    "sgd-momentum": Optimizer(1),
    # One momentum; what is no matrix as AdamW has it (owners.py).
    "muon": Optimizer(1, counted=False),
    "none": Optimizer(0),
}


@dataclass(frozen=True)
class Strategy:
    """`ranks`: all of them, in `replicas` groups that hold each shard once. `reshard`: of the units but the root,
    `reshard_after_forward`; `root_reshard`: of the root, None as without an argument. `compute`, `reduce`: dtypes, ""
    for that of the parameters; `storage`: of shards and optimizer state, "" as the model has them. `micro`: samples of
    one forward of a rank; `accumulate`: forwards and backwards of a step, of which the last sends gradients
    (`send_each`: each does). `recompute`: a way (`recomputation`), or one for each unit; with `+host` what it keeps is
    on the host. `tensor`: ranks that share each layer; `context`: ranks that share each sequence, of those that share
    the parameters; `experts`: ranks that have different experts, of both. `even`: a parameter whose rows the ranks
    cannot share evenly is cut along another dim, if they can share that (`shard_placement_fn`). `compiled`: units are
    compiled, which changes times alone; `float8`: so do linear layers in float8, whose gathers have `compute`;
    `compiled_loss`: the loss is, which changes what it holds (`compiled`).
    `hosts`: on which the ranks are, equally many on each; `ways`: of messages between them, None for the fastest on the
    hardware.
    `pipeline`: ranks of a pipeline, whose micro-batches `accumulate` counts; `stages`: of each of these ranks, by the
    schedule of that name.

    >>> Strategy(ranks=16, replicas=2).shard, Strategy(ranks=16, replicas=2, tensor=4).shard
    (8, 2)
    >>> Strategy(ranks=16, pipeline=2, tensor=2).shard
    4
    """

    ranks: int = 1
    replicas: int = 1
    reshard: bool | int = True
    root_reshard: bool | int | None = None
    compute: str = ""
    reduce: str = ""
    storage: str = ""
    micro: int = 1
    accumulate: int = 1
    send_each: bool = False
    recompute: str | tuple[str, ...] = NONE
    offload: bool = False
    even: bool = False
    optimizer: str = "adamw"
    prefetch_depth: int = 1
    backend: str = "nccl"
    tensor: int = 1
    context: int = 1
    compiled: bool = False
    compiled_loss: bool = False
    float8: bool = False
    experts: int = 1
    hosts: int = 1
    ways: Ways | None = None
    pipeline: int = 1
    schedule: str = "1F1B"
    stages: int = 1

    def __post_init__(self) -> None:
        for name in ("ranks", "replicas", "micro", "accumulate", "tensor", "context", "experts", "hosts", "pipeline"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, found {getattr(self, name)}")
        if self.ranks % self.pipeline:
            raise ValueError(f"pipeline: expected a number that divides the {self.ranks} ranks, found {self.pipeline}")
        if self.ranks // self.pipeline % self.tensor:
            ranks = self.ranks // self.pipeline
            raise ValueError(f"tensor: expected a number that divides the {ranks} ranks, found {self.tensor}")
        if self.ranks // self.pipeline // self.tensor % self.replicas:
            alike = "" if self.tensor == 1 else f" that have the same part of each layer, of {self.ranks}"
            ranks = self.ranks // self.pipeline // self.tensor
            raise ValueError(
                f"replicas: expected a number that divides the {ranks} ranks{alike}, found {self.replicas}"
            )
        if self.ranks % self.hosts:
            raise ValueError(f"hosts: expected a number that divides the {self.ranks} ranks, found {self.hosts}")
        if self.pipeline > 1 and self.send_each and self.accumulate > 1:
            raise ValueError("send_each: expected gradients that a pipeline reduces once in a step, found each of them")
        if self.pipeline > 1 and self.context > 1:
            raise ValueError(f"context: expected whole sequences in a pipeline, found {self.context} parts")
        if self.hosts > 1 and self.tensor * self.context * self.experts * self.pipeline > 1:
            raise ValueError(f"hosts: expected data parallelism alone, found {self}; plan one host")
        if self.hosts > 1 and self.optimizer == "muon":
            problem = "its matrices go to their owners, and are not counted by host; plan one host"
            raise ValueError(f"hosts: expected an optimizer that sends nothing, found muon: {problem}")
        if self.shard % self.context:
            raise ValueError(
                f"context: expected a number that divides the {self.shard} ranks that share the parameters, found "
                f"{self.context}"
            )
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer: expected one of {', '.join(OPTIMIZERS)}, found {self.optimizer!r}")
        if not isinstance(self.reshard, bool) and (self.reshard < 2 or self.shard % self.reshard):
            raise ValueError(
                f"reshard: expected a number above 1 that divides the {self.shard} ranks that share, found "
                f"{self.reshard}"
            )
        ways = (self.recompute,) if isinstance(self.recompute, str) else self.recompute
        if not all(map(is_way, ways)):
            raise ValueError(f"recompute: expected one of {', '.join(RECOMPUTATIONS)}, found {self.recompute!r}")

    @property
    def shard(self) -> int:
        """How many ranks share the parameters."""
        return self.ranks // self.pipeline // self.tensor // self.replicas

    @property
    def axes(self) -> tuple[int, ...]:
        """Ranks along each axis that has messages of its own."""
        return self.shard, self.replicas, self.tensor, self.context, self.experts, self.pipeline

    def stride(self, shards: int) -> int:
        """How far apart the ranks are of which `shards` share a parameter: those along `tp`, or with other experts, are
        between them.

        >>> Strategy(ranks=16, tensor=2).stride(8), Strategy(ranks=16, experts=4).stride(4)
        (2, 4)
        """
        return max(self.shard * self.tensor // shards, 1)

    def group(self, axis: str) -> tuple[int, int]:
        """How many ranks an axis of divided layers joins, and how far apart they are: neighbours share a layer, then a
        sequence; experts are divided over neighbours; the stages of a pipeline are furthest apart.

        >>> Strategy(ranks=16, tensor=4, context=2).group("tp"), Strategy(ranks=16, tensor=4, context=2).group("cp")
        ((4, 1), (2, 4))
        """
        return {
            "tp": (self.tensor, 1),
            "cp": (self.context, self.tensor),
            "ep": (self.experts, 1),
            "pp": (self.pipeline, self.ranks // self.pipeline),
        }[axis]

    @cached_property
    def placed(self) -> HostGroups:
        """The groups of its ranks on its hosts."""
        found = numbered(self.ranks, self.shard, self.hosts, self.backend)
        return found if self.ways is None else found._replace(ways=self.ways)

    @property
    def computed(self) -> str:
        """The dtype of full parameters, "" for that of the model."""
        return self.compute or self.storage

    def with_activations(self, *, hosted: bool) -> Strategy:
        """The same with what its units keep for backward on the host, or on the device. The root's stays there.

        >>> Strategy(ranks=2, recompute="whole").with_activations(hosted=True).recompute
        'whole+host'
        >>> Strategy(ranks=2, recompute=("none", "whole+host")).with_activations(hosted=False).recompute
        ('none', 'whole')
        """
        ways = self.recompute
        if isinstance(ways, str):
            return replace(self, recompute=on_host(ways) if hosted else without_host(ways))
        kept = tuple(map(without_host, ways))
        return replace(self, recompute=(kept[0], *map(on_host, kept[1:])) if hosted else kept)

    @property
    def hosts_activations(self) -> bool:
        """Whether some unit keeps its activations, or its inputs, on the host."""
        return any(map(is_on_host, [self.recompute] if isinstance(self.recompute, str) else self.recompute))

    def __str__(self) -> str:
        kept = "" if isinstance(self.reshard, bool) else f" keeping 1/{self.reshard}"
        name = "ZeRO-3" if self.reshard else "ZeRO-2"
        words = [name + kept if self.shard > 1 else "DDP" if self.replicas > 1 else "one rank"]
        if self.replicas > 1 and self.shard > 1:
            words.append(f"HSDP {self.replicas} x {self.shard}")
        words += [f"TP {self.tensor}"] * (self.tensor > 1) + [f"CP {self.context}"] * (self.context > 1)
        words += [f"EP {self.experts}"] * (self.experts > 1)
        each = f" with {self.stages} stages each" * (self.stages > 1)
        words += [f"PP {self.pipeline} {self.schedule}{each}"] * (self.pipeline > 1)
        words.append(f"micro-batch {self.micro}" + (f" x {self.accumulate}" if self.accumulate > 1 else ""))
        if isinstance(self.recompute, str):
            kept = without_host(self.recompute)
            words += [f"recompute {kept}"] * (kept != NONE)
        else:
            words.append("recompute by unit")
        words += ["even placement"] * self.even + ["compiled"] * self.compiled + ["float8"] * self.float8
        words += ["compiled loss"] * self.compiled_loss
        words += ["activations on the host"] * self.hosts_activations
        words += ["each reduced"] * (self.send_each and self.accumulate > 1) + ["offload"] * self.offload
        return ", ".join(words)


@dataclass(frozen=True)
class Limits:
    """How far gathers run ahead, and how many messages of gradients are under way; as `policy.Options` and
    `set_memory_budget` say. `prefetch_nbytes`: instead of `prefetch_depth`, in backward too. `send_buffers`: instead of
    `reductions_in_flight`, how many there are when another message is made. `gradient_nbytes`: of gradients and
    messages together."""

    prefetch_depth: int = 1
    prefetch_nbytes: int | None = None
    reductions_in_flight: int = 2
    send_buffers: int | None = None
    gradient_nbytes: int | None = None


@dataclass(frozen=True)
class Group:
    """Parameters of a unit that travel together: of one dtype, and of one dtype of compute. `sent`: those that get
    gradients, as their reduction has them; None if there are none."""

    memory: UnitMemory
    sent: UnitMemory | None
    parameters: tuple[Parameter, ...]
    state_nbytes: int
    # The names of the parameters within their unit. Message buffers are shared by layouts of equal names.
    names: tuple[str, ...] = ()
    # Where its ranks are, unless the strategy says it.
    placed: HostGroups | None = None

    @property
    def sent_names(self) -> tuple[str, ...]:
        return tuple(name for name, p in zip(self.names, self.parameters, strict=True) if p.trainable)

    @property
    def gathered_nbytes(self) -> int:
        """Bytes of the messages of an all-gather: what every rank has of it afterwards."""
        return sum(self.gathered_parts)

    @cached_property
    def gathered_parts(self) -> tuple[int, int]:
        """The same of parameters that travel by themselves, and of those that are packed."""
        return self._gathered(self.memory.pack, self.memory.plan)

    def _gathered(self, pack: FlatLayout, plan: GatherPlan) -> tuple[int, int]:
        if pack.world == 1:
            return 0, 0
        direct = sum(pack.segments[i].layout.padded_full_numel for i in plan.direct)
        return direct * self.memory.compute_itemsize, plan.staging_numel(pack) * self.memory.compute_itemsize

    @property
    def kept_gathered_nbytes(self) -> int:
        """The same for the gather of secondary shards over their block."""
        return sum(self.kept_gathered_parts)

    @cached_property
    def kept_gathered_parts(self) -> tuple[int, int]:
        kept = self.memory.kept
        return (0, 0) if kept is None else self._gathered(kept, self.memory.plan)

    @cached_property
    def stepped(self) -> tuple[tuple[Parameter, int], ...]:
        """The parameters that an optimizer steps, each with the bytes of its shard."""
        if self.sent is None:
            return ()
        trained = [parameter for parameter in self.parameters if parameter.trainable]
        size = self.sent.storage_itemsize
        pairs = zip(trained, self.sent.pack.segments, strict=True)
        return tuple((p, segment.layout.local_numel(0) * size) for p, segment in pairs if p.reached)

    @cached_property
    def gather_calls(self) -> int:
        return len(self.memory.plan.direct) + bool(self.memory.plan.packed) if self.memory.pack.world > 1 else 0

    @cached_property
    def reduced_message_nbytes(self) -> int:
        """Bytes that this rank puts into the messages of a reduction over the shards."""
        if self.sent is None or self.sent.pack.world == 1:
            return 0
        return self.sent.send_nbytes + self.sent.leaving_nbytes

    @property
    def reduce_calls(self) -> int:
        if self.sent is None or self.sent.pack.world == 1:
            return 0
        return len(self.sent.direct_gradients) + 1

    @property
    def replicated_message_nbytes(self) -> int:
        """Bytes of the all-reduce over the replicas."""
        if self.sent is None or self.sent.replicas == 1:
            return 0
        return self.sent.replicating_nbytes or self.sent.send_nbytes


@dataclass(frozen=True)
class Unit:
    """A unit under a strategy. `keeps`: full parameters stay after forward; `part`: of which a part is kept, 0 for
    none."""

    shape: UnitShape
    groups: tuple[Group, ...]
    keeps: bool
    part: int

    @property
    def trainable(self) -> bool:
        return any(p.trainable for p in self.shape.parameters)

    @property
    def some_frozen(self) -> bool:
        return any(not p.trainable for p in self.shape.parameters)

    @cached_property
    def gather_nbytes(self) -> int:
        return sum(g.memory.gather_nbytes + g.memory.uploaded_nbytes for g in self.groups)

    @cached_property
    def gradient_nbytes(self) -> int:
        """The full gradients, as autograd makes them."""
        return sum(g.sent.gradient_nbytes for g in self.groups if g.sent is not None)

    @cached_property
    def staying_nbytes(self) -> int:
        """Full parameters whose bytes stay between uses."""
        return sum(g.memory.full_nbytes for g in self.groups if g.memory.stays)

    @property
    def holds_gradients(self) -> bool:
        """Whether the last backward of a window adds to the gradients of earlier ones."""
        return any(g.sent.held_itemsize for g in self.groups if g.sent is not None)


def units_of(model: Model, strategy: Strategy) -> tuple[Unit, ...]:
    """Every unit of the model, the root first."""
    return tuple(_unit(shape, not shape.name, strategy) for shape in model.units)


def even_dim(shape: tuple[int, ...], world: int) -> int | None:
    """The first dim that `world` ranks share evenly; None if there is none.

    >>> even_dim((9, 4096), 8), even_dim((9, 7), 8)
    (1, None)
    """
    return next((i for i, size in enumerate(shape) if size % world == 0), None)


def _placed(parameter: Parameter, strategy: Strategy) -> int:
    if strategy.even and (dim := even_dim(parameter.shape, strategy.shard)) is not None:
        return parameter.placed if parameter.shape[parameter.placed] % strategy.shard == 0 else dim
    return parameter.placed


def _unit(shape: UnitShape, outer: bool, strategy: Strategy) -> Unit:
    reshard = shape.reshard
    if reshard is None:
        reshard = strategy.root_reshard if outer else strategy.reshard
    if reshard is None:
        reshard = not outer
    part = 0 if isinstance(reshard, bool) or reshard == strategy.shard else int(reshard)
    shards = next((p.shards for p in shape.parameters if p.shards), strategy.shard)
    if shards != strategy.shard:  # experts, on a mesh of their own
        ranks = shards * strategy.replicas * strategy.pipeline
        strategy = replace(strategy, ranks=ranks, tensor=1, context=1, experts=1)
    kinds: dict[tuple[str, str], list[Parameter]] = {}
    for parameter in shape.parameters:
        parameter = replace(parameter, placed=_placed(parameter, strategy))
        kinds.setdefault((_stored_as(parameter, strategy), _compute_of(parameter, strategy)), []).append(parameter)
    strategy = replace(strategy, recompute=NONE)
    groups = tuple(
        _group(tuple(found), dtype, part, replace(strategy, compute=compute))
        for (dtype, compute), found in kinds.items()
    )
    # Equal layouts are made once; names are those of the first unit that has them.
    inner = f"{shape.name}." if shape.name else ""
    groups = tuple(
        replace(g, parameters=tuple(found), names=tuple(p.name.removeprefix(inner) for p in found))
        for g, found in zip(groups, kinds.values(), strict=True)
    )
    return Unit(shape, groups, not reshard, part)


def _stored_as(parameter: Parameter, strategy: Strategy) -> str:
    """The dtype of the shards of `parameter`."""
    changes = strategy.storage and parameter.dtype.startswith(("float", "bfloat")) and not parameter.kept
    return strategy.storage if changes else parameter.dtype


def _compute_of(parameter: Parameter, strategy: Strategy) -> str:
    """The dtype that `parameter` computes in."""
    stored = _stored_as(parameter, strategy)
    floating = stored.startswith(("float", "bfloat"))
    return strategy.compute if strategy.compute and floating and not parameter.kept else stored


def _group(parameters: tuple[Parameter, ...], dtype: str, part: int, strategy: Strategy) -> Group:
    shapes = tuple((p.shape, p.placed, p.trainable) for p in parameters)
    memory, sent = _layouts(shapes, dtype, part, replace(strategy, micro=1, optimizer="none"))
    state = 0
    if sent is not None:
        for parameter in parameters:
            if parameter.is_stepped:
                optimizer = _optimizer_of(parameter, strategy)
                layout = ShardLayout(parameter.shape, parameter.placed, strategy.shard)
                numel = layout.local_numel(0)
                state += optimizer.copies * numel * itemsize(dtype) + int(optimizer.nbytes * numel) + optimizer.counter
    return Group(memory, sent, parameters, state)


def _optimizer_of(parameter: Parameter, strategy: Strategy) -> Optimizer:
    """The optimizer that steps `parameter`."""
    return OPTIMIZERS["adamw" if strategy.optimizer == "muon" and not parameter.is_matrix else strategy.optimizer]


@lru_cache(maxsize=4096)
def _layouts(
    shapes: tuple[tuple[tuple[int, ...], int, bool], ...], dtype: str, part: int, strategy: Strategy
) -> tuple[UnitMemory, UnitMemory | None]:
    """The memory of one group, and of the part of it that is reduced; as `param/group.py` and `comm/reduce.py`
    decide."""
    storage = itemsize(dtype)
    floating = dtype.startswith(("float", "bfloat"))
    compute = itemsize(strategy.compute)
    reduce = itemsize(strategy.reduce) if strategy.reduce and floating else storage
    wire = min(compute, reduce)
    summed = max(reduce, 4) if floating else reduce
    world, backend = strategy.shard, strategy.backend
    alignment = align_numel([storage, compute, wire])
    threshold = DIRECT_GATHER_NBYTES

    def packed(chosen: Sequence[tuple[tuple[int, ...], int, bool]], first: tuple[int, ...]) -> FlatLayout:
        return FlatLayout.build(
            [ShardLayout(shape, dim, world) for shape, dim, _ in chosen],
            alignment,
            first=first,
            full_align_numel=alignment if world == 1 else None,
        )

    layouts = [ShardLayout(shape, dim, world) for shape, dim, _ in shapes]
    direct = direct_indices(layouts, compute, backend=backend, direct_threshold_nbytes=threshold)
    pack = packed(shapes, direct)
    plan = plan_gather(pack, compute, backend=backend, direct_threshold_nbytes=threshold)
    exchanges, in_levels = exchanges_gradients(backend), False
    if strategy.hosts > 1:
        exchanges, in_levels = strategy.placed.exchanges, strategy.placed.levels is not None
    sums_here = (exchanges or in_levels) and world > 1
    # A window holds gradients in the reduce dtype, and sends them in it.
    held = reduce if (strategy.accumulate > 1 or strategy.pipeline > 1) and not strategy.send_each else 0
    memory = UnitMemory(
        "",
        pack,
        plan,
        storage,
        compute,
        wire if exchanges and not held else reduce,
        exchanges=exchanges,
        replicas=strategy.replicas,
        sum_itemsize=summed if sums_here else reduce,
        kept=secondary_layout(pack, plan.direct, part) if part else None,
        held_itemsize=held,
        offloaded=strategy.offload,
        in_levels=in_levels and world > 1,
    )
    if not any(trainable for _, _, trainable in shapes):
        return memory, None
    chosen = [shape for shape in shapes if shape[2]]
    positions = [i for i, shape in enumerate(shapes) if shape[2]]
    sent_layouts = [layouts[i] for i in positions]
    leaving: tuple[int, ...] = ()
    if world > 1:
        if exchanges:
            leaving = direct_gradients(sent_layouts, memory.wire_itemsize, backend=backend)
        elif groups_messages(backend):
            leaving = tuple(
                k
                for k, (i, layout) in enumerate(zip(positions, sent_layouts, strict=True))
                if i in plan.direct and layout.padded_full_numel == layout.numel
            )
    sent_pack = packed(chosen, leaving)
    sent_plan = plan_gather(
        packed(chosen, direct_indices(sent_layouts, compute, backend=backend, direct_threshold_nbytes=threshold)),
        compute,
        backend=backend,
        direct_threshold_nbytes=threshold,
    )
    return memory, replace(memory, pack=sent_pack, plan=sent_plan, direct_gradients=leaving, kept=None)
