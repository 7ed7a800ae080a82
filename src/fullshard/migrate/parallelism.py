"""`Parallelism`: the degrees of all axes, and how modules are divided, as one value that checks itself. No torch.

    plan = Parallelism(data_parallel_replicate_degree=2, tensor_parallel_degree=2)
    print(plan.on(8))                     # the mesh, who shares what, who gets which data
    plan.on(8, ModelShape(heads=32, kv_heads=8, vocabulary=128256))

`on` gives the axes for a number of ranks (`axes.Axes`); `styles` has the words for modules.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ..keys import ConfigError, checked, invalid, setting
from .axes import Axes
from .schedules import SCHEDULES, find_schedule, parts_of, stages_per_rank
from .styles import Style

AUTO = "auto"
# The axis of each degree.
DEGREES = {
    "pipeline_parallel_degree": "pp",
    "data_parallel_replicate_degree": "dp_replicate",
    "data_parallel_shard_degree": "dp_shard",
    "context_parallel_degree": "cp",
    "tensor_parallel_degree": "tp",
    "expert_parallel_degree": "ep",
    "expert_tensor_parallel_degree": "etp",
}
_ASYNC = (
    "torch fuses these messages with matrix products in models that are compiled whole, with symmetric memory of CUDA "
    "devices; units are compiled apart here"
)


@dataclass(frozen=True, slots=True)
class ParallelismKeys:
    tensor_parallel_degree: int = setting(
        1, "ranks that share each layer", least=1, spellings=("tp_size", "tensor_parallel_size", "tp_degree")
    )
    enable_sequence_parallel: bool | str = setting(
        AUTO,
        'between these layers each rank has its part of the tokens; "auto" = where the model\'s styles say how',
        words=(AUTO,),
    )
    context_parallel_degree: int = setting(
        1, "ranks that share each sequence, along which parameters are cut too", least=1, spellings=("cp_size",)
    )
    context_parallel_variant: str = setting(
        AUTO,
        'attention between these ranks: "ulysses" exchanges heads, "ring" sends keys and values around; "auto" = the '
        "first where heads divide, else the second",
        choices=(AUTO, "ulysses", "ring"),
    )
    pipeline_parallel_degree: int = setting(1, "ranks that have different layers", least=1, spellings=("pp_size",))
    expert_parallel_degree: int = setting(1, "ranks among which experts are divided", least=1, spellings=("ep_size",))
    expert_tensor_parallel_degree: int = setting(
        1, "ranks that share each expert: 1, or as many as share each layer", least=1, spellings=("etp_size",)
    )
    enable_loss_parallel: bool = setting(
        False, "logits stay cut along the vocabulary for the loss; also read: `disable_loss_parallel`"
    )
    styles: tuple[tuple[str, str], ...] = setting(
        (),
        "a table of names of modules, in which `*` stands for a part of a name, and how each is divided: column, row, "
        "sequence, replicated, expert, keep; before those of the model itself",
    )
    pipeline_parallel_schedule: str = setting("1F1B", f"the order of micro-batches: {', '.join(SCHEDULES)}")
    pipeline_parallel_microbatch_size: int = setting(
        0, "samples of a rank in one micro-batch of a pipeline; 0 = by their number", least=0
    )
    pipeline_parallel_num_microbatches: int = setting(
        0, "micro-batches of a step of a pipeline; 0 = by their size, or as many as there are stages", least=0
    )
    pipeline_parallel_stages_per_rank: int = setting(
        0, "stages that each rank has; 0 = one, or two where the schedule has several", least=0
    )
    module_fqns_per_model_part: tuple[tuple[str, ...], ...] = setting(
        (), "names of the modules of each stage; empty = balanced by counted parameters"
    )

    @property
    def num_stages(self) -> int:
        """The stages of a pipeline; 1 without."""
        if self.pipeline_parallel_degree == 1:
            return 1
        each = stages_per_rank(find_schedule(self.pipeline_parallel_schedule), self.pipeline_parallel_stages_per_rank)
        return each * self.pipeline_parallel_degree

    @property
    def beyond_data(self) -> bool:
        """Whether some axis is asked for beside those of data parallelism."""
        return any(getattr(self, key) > 1 for key in DEGREES if hasattr(ParallelismKeys, key))


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The numbers of a model that degrees have to divide; 0: not known, or the model has none."""

    heads: int = 0
    kv_heads: int = 0
    feed_forward: int = 0
    vocabulary: int = 0
    sequence: int = 0
    experts: int = 0
    layers: int = 0
    expert_width: int = 0

    @classmethod
    def of(cls, config: Any) -> ModelShape:
        """The shape that a Hugging Face configuration, or one with the same names, describes."""

        def first(*names: str) -> int:
            values = (getattr(config, name, None) for name in names)
            return next((value for value in values if type(value) is int), 0)

        heads = first("num_attention_heads", "n_head")
        return cls(
            heads=heads,
            kv_heads=first("num_key_value_heads") or heads,
            feed_forward=first("intermediate_size", "ffn_dim"),
            vocabulary=first("vocab_size"),
            experts=first("num_local_experts", "num_experts", "n_routed_experts"),
            layers=first("num_hidden_layers", "n_layer"),
        )


@dataclass(frozen=True, slots=True)
class Parallelism(ParallelismKeys):
    """All axes of a run in one declaration, with torchtitan's names; -1 is what the other degrees leave.

    Made by itself, or by `ShardingConfig.parallel`. Raises `ConfigError` for a value that no number of ranks and no
    model makes legal; `on` raises it for the rest, each in one line with the nearest legal plan.
    """

    data_parallel_replicate_degree: int = 1
    data_parallel_shard_degree: int = -1
    # torchtitan's name: refused, so that it is not without effect.
    enable_async_tensor_parallel: bool = False

    def __post_init__(self) -> None:
        styles: Any = self.styles
        pairs = styles.items() if isinstance(styles, Mapping) else styles
        object.__setattr__(self, "styles", tuple((str(name), str(style)) for name, style in pairs))
        object.__setattr__(self, "module_fqns_per_model_part", parts_of(self.module_fqns_per_model_part))
        object.__setattr__(self, "pipeline_parallel_schedule", find_schedule(self.pipeline_parallel_schedule).name)
        for key in fields(ParallelismKeys):
            if key.name not in ("styles", "module_fqns_per_model_part"):
                checked(f"parallelism.{key.name}", key, getattr(self, key.name))
        for name in ("data_parallel_replicate_degree", "data_parallel_shard_degree"):
            degree = getattr(self, name)
            if type(degree) is not int or (degree < 1 and degree != -1):
                raise invalid(f"parallelism.{name}", degree, "expected -1 (all that are left) or at least 1", "-1")
        self.check()

    def check(self) -> None:
        """Rules between keys. Raises `ConfigError`."""
        check_keys(self)
        refuse_async(self.enable_async_tensor_parallel)
        if self.data_parallel_replicate_degree == self.data_parallel_shard_degree == -1:
            name = "parallelism.data_parallel_replicate_degree"
            raise invalid(name, -1, "expected one of the two degrees, found -1 for both", "1")

    def on(self, world: int, shape: ModelShape | None = None) -> Axes:
        """The axes on `world` ranks, for a model of `shape`. Raises `ConfigError` with the nearest legal plan."""
        broken = self.broken(world, shape)
        if not broken:
            return self._filled(world)
        raise ConfigError(f"{broken[0]}; {self.nearest(world, shape)}")

    def broken(self, world: int, shape: ModelShape | None = None) -> list[str]:
        """Each rule that the degrees break on `world` ranks, for a model of `shape`, by the key that does."""
        return [*self._broken(self._filled(world), world, shape or ModelShape())]

    def nearest(self, world: int, shape: ModelShape | None = None) -> str:
        """The legal plan whose degrees differ least from the ones asked for, in words."""
        return self._nearest(world, shape or ModelShape())

    # ---- rules -------------------------------------------------------------------------------------------------------

    def _filled(self, world: int) -> Axes:
        """The degrees as they are, with -1 as what is left, rounded down and at least 1."""
        sizes = {axis: getattr(self, name) for name, axis in DEGREES.items()}
        given = math.prod(size for axis, size in sizes.items() if axis not in ("ep", "etp") and size != -1)
        return Axes(**{axis: max(world // given, 1) if size == -1 else size for axis, size in sizes.items()})

    def _broken(self, axes: Axes, world: int, shape: ModelShape) -> Iterator[str]:
        """Each rule that `axes` break, by name."""
        if axes.world != world:
            asked = " x ".join(
                f"{name} {getattr(axes, axis)}"
                for name, axis in DEGREES.items()
                if axis not in ("ep", "etp") and (getattr(axes, axis) > 1 or getattr(self, name) == -1)
            )
            yield f"parallelism: {asked or 'all degrees 1'} are {axes.world} of {_ranks(world)}"
            return
        if axes.etp not in (1, axes.tp):
            problem = f"expected 1, or the tensor_parallel_degree of {axes.tp}"
            yield f"parallelism.expert_tensor_parallel_degree = {axes.etp}: {problem}"
        room = axes.shards * (axes.tp if axes.etp == 1 else 1)
        if room % axes.ep:
            what = "dp_shard, cp and tp" if axes.etp == 1 else "dp_shard and cp"
            yield f"parallelism.expert_parallel_degree = {axes.ep}: must divide the {room} ranks of {what}"
        stages = axes.pp * self.num_stages // self.pipeline_parallel_degree
        if shape.layers and axes.pp > 1 and stages > shape.layers:
            each = f" of {stages // axes.pp} stages on each rank" if stages > axes.pp else ""
            problem = f"expected a layer for each stage, found {shape.layers} layers"
            yield f"parallelism.pipeline_parallel_degree = {axes.pp}{each}: {problem}"
        for name, what, number, parts in self._divided(axes, shape):
            if number and number % parts:
                yield f"parallelism.{name} = {getattr(axes, DEGREES[name])}: must divide the {what}, {number}" + (
                    f" (into {parts})" if parts != getattr(axes, DEGREES[name]) else ""
                )

    def _divided(self, axes: Axes, shape: ModelShape) -> Iterator[tuple[str, str, int, int]]:
        """(key, what of the model, how many there are, into how many parts they go)."""
        tensor, context = "tensor_parallel_degree", "context_parallel_degree"
        yield tensor, "query heads", shape.heads, axes.tp
        yield tensor, "key and value heads", shape.kv_heads, axes.tp
        yield tensor, "width of the feed-forward layer", shape.feed_forward, axes.tp
        yield tensor, "vocabulary", shape.vocabulary, axes.tp
        # Each rank has a part of the first half and one of the second, so that all have as much to do.
        yield context, "tokens of a sequence", shape.sequence, axes.cp * 2 if axes.cp > 1 else 1
        if self.context_parallel_variant == "ulysses" and axes.cp > 1 and shape.heads % axes.tp == 0:
            yield context, "query heads of a rank", shape.heads // axes.tp, axes.cp
        if self.enable_sequence_parallel is True:
            yield tensor, "tokens of a part of a sequence", shape.sequence // axes.cp, axes.tp
        yield "expert_parallel_degree", "experts", shape.experts, axes.ep
        yield "expert_tensor_parallel_degree", "width of an expert", shape.expert_width, axes.etp

    def _nearest(self, world: int, shape: ModelShape) -> str:
        """The legal plan whose degrees differ least from the ones asked for, in octaves."""
        asked = self._filled(world)
        free = [axis for axis in ("pp", "dp_replicate", "cp", "tp", "ep") if getattr(asked, axis) > 1]
        factors = [k for k in range(1, world + 1) if world % k == 0]
        best: tuple[float, Axes] | None = None
        for sizes in itertools.product(factors, repeat=len(free)):
            changed = replace(asked, **dict(zip(free, sizes, strict=True)))
            others = changed.pp * changed.dp_replicate * changed.cp * changed.tp
            if world % others:
                continue
            changed = replace(changed, dp_shard=world // others, etp=changed.tp if asked.etp > 1 else 1)
            compared = free if self.data_parallel_shard_degree == -1 else [*free, "dp_shard"]
            away = sum(abs(math.log2(getattr(changed, axis) / getattr(asked, axis))) for axis in compared)
            if (best is None or away < best[0]) and next(self._broken(changed, world, shape), None) is None:
                best = away, changed
        if best is None:
            return "no degrees make it legal: change the model, or the number of ranks"
        plan = {name: getattr(best[1], axis) for name, axis in DEGREES.items()}
        told = {name: size for name, size in plan.items() if size > 1 or name == "data_parallel_shard_degree"}
        return "nearest legal plan: " + ", ".join(f"{name} = {size}" for name, size in told.items())

    def __str__(self) -> str:
        degrees = [f"{name} = {getattr(self, name)}" for name in DEGREES if getattr(self, name) != 1]
        lines = [", ".join(degrees)]
        if self.enable_loss_parallel:
            lines.append("loss: logits are cut along the vocabulary")
        lines += [f"{pattern}: {Style.read(style)}" for pattern, style in self.styles]
        return "\n".join(lines)


def check_keys(keys: ParallelismKeys) -> None:
    """Rules between keys that need no number of ranks. Raises `ConfigError`."""
    _check_pipeline(keys)
    for pattern, style in keys.styles:
        Style.read(style, f'parallelism.styles["{pattern}"]')
    if keys.context_parallel_degree == 1 and keys.context_parallel_variant != AUTO:
        problem = "has no effect with context_parallel_degree = 1"
        name = "parallelism.context_parallel_variant"
        raise invalid(name, keys.context_parallel_variant, problem, "context_parallel_degree = 2")
    if keys.tensor_parallel_degree == 1:
        for name in ("enable_sequence_parallel", "enable_loss_parallel"):
            if getattr(keys, name) is True:
                problem = "has no effect with tensor_parallel_degree = 1"
                raise invalid(f"parallelism.{name}", True, problem, "tensor_parallel_degree = 2")
        if keys.expert_parallel_degree == 1 and keys.styles:
            problem = "have no effect with tensor_parallel_degree = 1; leave them out, or set it"
            raise ConfigError(f"parallelism.styles: {problem}; nearest valid: tensor_parallel_degree = 2")


def _check_pipeline(keys: ParallelismKeys) -> None:
    schedule = find_schedule(keys.pipeline_parallel_schedule)
    number, size = keys.pipeline_parallel_num_microbatches, keys.pipeline_parallel_microbatch_size
    degree, default = keys.pipeline_parallel_degree, ParallelismKeys()
    names = ("schedule", "microbatch_size", "num_microbatches", "stages_per_rank")
    for name in (*(f"pipeline_parallel_{each}" for each in names), "module_fqns_per_model_part"):
        if degree == 1 and getattr(keys, name) != getattr(default, name):
            problem = "has no effect with pipeline_parallel_degree = 1"
            raise invalid(f"parallelism.{name}", getattr(keys, name), problem, "pipeline_parallel_degree = 2")
    if degree == 1:
        return
    if number and size:
        problem = f"expected it or pipeline_parallel_num_microbatches = {number}, found both; leave one out"
        raise invalid("parallelism.pipeline_parallel_microbatch_size", size, problem, "0")
    stages = keys.num_stages
    if number and (problem := schedule.problem(number, degree, stages)):
        nearest = min((n for n in range(1, 2 * number + 2 * stages) if not schedule.problem(n, degree, stages)),
                      key=lambda n: (abs(n - number), n))  # fmt: skip
        raise invalid("parallelism.pipeline_parallel_num_microbatches", number, problem, str(nearest))
    parts = keys.module_fqns_per_model_part
    if parts and len(parts) != stages:
        raise ConfigError(
            f"parallelism.module_fqns_per_model_part: expected a list for each of the {stages} stages "
            f"({degree} ranks with {stages // degree} each), found {len(parts)}; nearest valid: {stages} lists"
        )


def refuse_async(value: object) -> None:
    """Raise `ConfigError` for `enable_async_tensor_parallel`, unless it is off."""
    if value is not False:
        raise invalid("parallelism.enable_async_tensor_parallel", value, f"not built: {_ASYNC}", "false")


def _ranks(world: int) -> str:
    return f"{world} rank" + ("s" if world != 1 else "")
