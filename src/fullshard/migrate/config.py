"""The configuration of `prepare_fully_shard` as data: how a model is divided, sharded, filled and trained. No torch.

`ShardingConfig` has one frozen dataclass per section (that of [parallelism] is in `parallelism`); each key carries its
meaning, its limits and its other spellings as field metadata. `reading` makes it from a dict or a file and prints it.
Rules between keys are in `ShardingConfig.check`, rules that need the number of ranks in `ShardingConfig.degrees`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from ..keys import ConfigError, invalid, setting
from .parallelism import Parallelism, ParallelismKeys, check_keys

DEFAULT, ALWAYS, NEVER, AUTO = "default", "always", "never", "auto"
_DTYPES = ("float32", "bfloat16", "float16", "float64")
WRAPPINGS = ("auto", "children", "classes", "no_split_modules", "attributes", "size", "function", "plan", "none")
SOURCES = ("auto", "given", "cpu", "meta", "mixed", "pretrained")

COMPILERS = ("inductor", "aot_eager", "eager")

# One unit of a written plan: a pattern, each match of which is a unit, or several that are one unit together.
PlanEntry = str | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WrapKeys:
    by: str = setting(
        "auto",
        'what becomes a unit. "auto": modules marked by attributes, else the outermost that Hugging Face names, else '
        'the members of the largest list; "children": direct children; "attributes": `_fsdp_wrap` and `fsdp_wrap_fn`; '
        '"none": the root alone',
        choices=WRAPPINGS,
        spellings=("policy", "auto_wrap_policy"),
    )
    classes: tuple[str, ...] = setting(
        (), 'names of classes, for "classes"', spellings=("transformer_layer_cls_to_wrap",)
    )
    min_params: int = setting(
        100_000_000, 'elements from which a module is a unit, for "size"', least=1, spellings=("min_num_params",)
    )
    function: str = setting("", '"module:function", (name, module) -> bool or arguments of fully_shard, for "function"')
    plan: tuple[PlanEntry, ...] = setting(
        (), 'names of modules, for "plan"; `*` stands for one part of a name; a list in the list is one unit'
    )
    group_ends: bool = setting(True, "embeddings in units of their own, final norm and head in one unit")
    ties: str = setting(
        "lowest_common",
        'a parameter shared between units goes to the lowest unit around all its users ("lowest_common"), to one unit '
        'of all these modules ("one_unit"), or is an error ("refuse")',
        choices=("lowest_common", "one_unit", "refuse"),
    )
    compile: bool | str = setting(
        False,
        "compile the blocks, each by itself: after their layers are divided and recomputed, before they are sharded; "
        "true = by inductor, or one of these backends of torch",
        words=COMPILERS,
    )
    ignored: tuple[str, ...] = setting((), "names of parameters or modules to leave unsharded; `*` stands for any text")


@dataclass(frozen=True, slots=True)
class ShardingKeys:
    data_parallel_shard_degree: int = setting(
        -1,
        "ranks that share one copy of the state; -1 = all that are left",
        least=-1,
        spellings=("dp_shard_size", "dp_shard", "data_parallel_shard_dim", "data_parallel_size", "shard_degree"),
    )
    data_parallel_replicate_degree: int = setting(
        1,
        "number of such groups, each with a copy (HSDP); -1 = all that are left",
        least=-1,
        spellings=("dp_replicate_size", "dp_replicate", "data_parallel_replicate_dim", "replicate_degree"),
    )
    reshard_after_forward: bool | int | str = setting(
        DEFAULT,
        'free full parameters after forward: "default" = all but the root\'s, in a pipeline none; true or "always"; '
        'false or "never"; a '
        "number k = keep 1/k, gathered again among k ranks",
        words=(DEFAULT, ALWAYS, NEVER),
        least=2,
        spellings=("fsdp_reshard_after_forward", "custom_reshard_after_forward"),
    )
    cpu_offload: bool = setting(
        False,
        "shards, gradients and optimizer state in host memory",
        spellings=("enable_cpu_offload", "fsdp_cpu_offload", "offload_params", "fsdp_offload_params"),
    )
    pin_memory: bool = setting(True, "page-locked host memory, for cpu_offload")


@dataclass(frozen=True, slots=True)
class PrecisionKeys:
    mode: str = setting(
        "FULL",
        '"FULL": all in the dtype of the parameters; "DEFAULT": compute in `dtype`, reduce in float32; "PURE": both in '
        "`dtype`",
        choices=("FULL", "DEFAULT", "PURE"),
        spellings=("mixed_precision",),
    )
    dtype: str = setting("bfloat16", "the low-precision dtype of DEFAULT and PURE", choices=_DTYPES)
    param: str = setting(
        DEFAULT,
        'dtype of gathered parameters and of compute; "default" = by mode',
        choices=(DEFAULT, *_DTYPES),
        spellings=("param_dtype", "mixed_precision_param"),
    )
    reduce: str = setting(
        DEFAULT,
        'dtype in which gradients are summed; "default" = by mode',
        choices=(DEFAULT, *_DTYPES),
        spellings=("reduce_dtype", "mixed_precision_reduce"),
    )
    output: str = setting(
        DEFAULT,
        'dtype of the outputs of the root; "default" = as they come',
        choices=(DEFAULT, *_DTYPES),
        spellings=("output_dtype",),
    )
    cast_inputs: bool | tuple[str, ...] = setting(
        True,
        "cast inputs of units to the compute dtype: all, none, or arguments of these names; `!freqs`: all but it",
        spellings=("cast_forward_inputs",),
    )
    master: str = setting(
        DEFAULT,
        'dtype of the trainable parameters between steps, which the optimizer updates; "default" = as the model is '
        "built. Frozen and ignored ones keep theirs",
        choices=(DEFAULT, *_DTYPES),
        spellings=("master_dtype", "master_weights"),
    )
    keep_float32: tuple[str, ...] = setting(
        ("BatchNorm",),
        "names of classes whose modules compute in the dtype of their parameters, derived classes included; `*` stands "
        'for any text, "BatchNorm" for each BatchNorm of torch',
        spellings=("keep_in_fp32", "module_classes_to_ignore", "_module_classes_to_ignore"),
    )

    @property
    def dtypes(self) -> tuple[str | None, str | None, str | None]:
        """(compute, reduce, output) by their names in torch; None where nothing is cast."""
        modes = {"FULL": (None, None), "DEFAULT": (self.dtype, "float32"), "PURE": (self.dtype, self.dtype)}
        param, reduce = modes[self.mode]
        return (
            param if self.param == DEFAULT else self.param,
            reduce if self.reduce == DEFAULT else self.reduce,
            None if self.output == DEFAULT else self.output,
        )


@dataclass(frozen=True, slots=True)
class InitialisationKeys:
    source: str = setting(
        "auto",
        'where values come from. "given": each rank has them; "cpu": rank 0\'s are sent; "mixed": rank 0 has them, the '
        'others are on the meta device; "meta": `materialize`; "pretrained": files at `path`; "auto": by the ranks',
        choices=SOURCES,
        spellings=("init_device",),
    )
    path: str = setting("", 'folder with safetensors files, for "pretrained"')
    allow_missing: tuple[str, ...] = setting((), "names that the files may lack; they are initialised")
    allow_unexpected: tuple[str, ...] = setting((), "names in the files that the model may lack")
    seed: int = setting(0, "seed of what is initialised; equal values at any number of ranks", least=0)


@dataclass(frozen=True, slots=True)
class ActivationKeys:
    at: str = setting(
        "none",
        'modules whose activations are not kept: "children" of the model, "units" of the wrapping, "classes" by name, '
        '"attributes": `_activation_checkpointing` and `activation_checkpointing_fn`',
        choices=("none", "children", "units", "classes", "attributes"),
    )
    classes: tuple[str, ...] = setting((), 'names of classes, for "classes"')
    every: int = setting(1, "of these modules every n-th alone", least=1)
    recompute: bool = setting(True, "keep their inputs, and compute the rest again in backward")
    save: tuple[str, ...] = setting((), 'operators whose results are kept anyway, such as "aten.mm"')
    offload: bool = setting(False, "hold what is kept in host memory until backward")


@dataclass(frozen=True, slots=True)
class MicroBatchKeys:
    size: int | str = setting(
        0, 'samples of a rank in one forward; 0 = all; "auto" = what memory allows', least=0, words=(AUTO,)
    )
    reduce: str = setting(
        "last", 'gradients are sent after the "last" micro-batch of a window, or after "each"', choices=("last", "each")
    )


@dataclass(frozen=True, slots=True)
class StateDictKeys:
    kind: str = setting(
        "sharded",
        '"sharded": each rank its rows, no communication; "full": whole tensors',
        choices=("sharded", "full"),
        spellings=("type", "state_dict_type"),
    )
    rank0_only: bool = setting(False, 'of "full": rank 0 alone has them')
    offload_to_cpu: bool = setting(False, "tensors in host memory")


@dataclass(frozen=True, slots=True)
class Override:
    """Other arguments of `fully_shard` for some units; None leaves what the sections say."""

    modules: str = setting("", "names of units, by pattern, or the name of a class")
    reshard_after_forward: bool | int | str | None = setting(
        None, "as in [sharding]", words=(DEFAULT, ALWAYS, NEVER), least=2
    )
    param: str | None = setting(None, "dtype of compute", choices=(DEFAULT, *_DTYPES), spellings=("param_dtype",))
    reduce: str | None = setting(
        None, "dtype of the reduction", choices=(DEFAULT, *_DTYPES), spellings=("reduce_dtype",)
    )
    output: str | None = setting(None, "dtype of outputs", choices=(DEFAULT, *_DTYPES), spellings=("output_dtype",))
    cast_inputs: bool | tuple[str, ...] | None = setting(None, "as in [precision]", spellings=("cast_forward_inputs",))
    cpu_offload: bool | None = setting(None, "as in [sharding]")
    optional: bool | None = setting(None, "only some ranks run them in a step; the others join their messages")


@dataclass(frozen=True, slots=True)
class ShardingConfig:
    """All that `prepare_fully_shard` takes, valid in itself after `check`; made by `read_config` from dicts and files.

    Parallelism stays outside of the model: one definition trains with any of these.
    """

    wrap: WrapKeys = WrapKeys()
    sharding: ShardingKeys = ShardingKeys()
    parallelism: ParallelismKeys = ParallelismKeys()
    precision: PrecisionKeys = PrecisionKeys()
    initialisation: InitialisationKeys = InitialisationKeys()
    activation_checkpointing: ActivationKeys = ActivationKeys()
    micro_batches: MicroBatchKeys = MicroBatchKeys()
    state_dict: StateDictKeys = StateDictKeys()
    override: tuple[Override, ...] = ()

    def check(self) -> None:
        """Rules between keys. Raises `ConfigError`."""
        wrap, sharding, source = self.wrap, self.sharding, self.initialisation
        _goes_with("wrap.classes", wrap.classes, "wrap.by", wrap.by, "classes")
        _goes_with("wrap.function", wrap.function, "wrap.by", wrap.by, "function")
        _goes_with("wrap.plan", list(wrap.plan), "wrap.by", wrap.by, "plan")
        if wrap.function and not all(wrap.function.partition(":")):
            raise invalid("wrap.function", wrap.function, 'expected "module:function"')
        if wrap.min_params != WrapKeys().min_params and wrap.by != "size":
            raise invalid(
                "wrap.min_params", wrap.min_params, f'has no effect with wrap.by = "{wrap.by}"', 'by = "size"'
            )
        _goes_with("initialisation.path", source.path, "initialisation.source", source.source, "pretrained")
        if (source.allow_missing or source.allow_unexpected) and source.source != "pretrained":
            raise invalid("initialisation.source", source.source, "allow_missing is about files", '"pretrained"')
        _check_degrees(sharding)
        check_keys(self.parallelism)
        if sharding.pin_memory != ShardingKeys().pin_memory and not (
            sharding.cpu_offload or any(found.cpu_offload for found in self.override)
        ):
            raise invalid("sharding.pin_memory", False, "has no effect without cpu_offload", "cpu_offload = true")
        self._check_activations()
        self._check_kept()
        self.check_sizes()
        if self.micro_batches.size == 0 and self.micro_batches.reduce != "last":
            raise invalid("micro_batches.reduce", "each", "has no effect without micro_batches.size", 'size = "auto"')
        if self.state_dict.rank0_only and self.state_dict.kind != "full":
            raise invalid("state_dict.rank0_only", True, 'has no effect with kind = "sharded"', 'kind = "full"')
        for number, found in enumerate(self.override):
            if not found.modules:
                raise ConfigError(f'override[{number}].modules: expected the units meant, such as "layers.0"')
            if all(getattr(found, key.name) is None for key in fields(Override)[1:]):
                raise ConfigError(f"override[{number}]: expected a setting for {found.modules}, found none")

    def check_sizes(self) -> None:
        """Raise `ConfigError` for micro-batches of any size beside an axis along which ranks wait for each
        other within a forward."""
        if self.micro_batches.size == AUTO and self.parallelism.beyond_data:
            problem = (
                "ranks that share layers, sequences or experts wait for the one that is out of memory; give a number"
            )
            raise invalid("micro_batches.size", AUTO, problem, "1")

    def _check_kept(self) -> None:
        keys = self.precision
        dtypes = [keys.dtypes[0], *(found.param for found in self.override)]
        low = any(name not in (None, DEFAULT) for name in dtypes) or self.wrap.by == "function"
        if keys.keep_float32 not in ((), PrecisionKeys().keep_float32) and not low:
            problem = "has no effect where all compute in the dtype of the parameters"
            raise invalid("precision.keep_float32", list(keys.keep_float32), problem, 'precision.mode = "DEFAULT"')

    def _check_activations(self) -> None:
        keys = self.activation_checkpointing
        name = "activation_checkpointing"
        _goes_with(f"{name}.classes", keys.classes, f"{name}.at", keys.at, "classes")
        if keys.at == "none":
            for changed in ("every", "recompute", "save", "offload"):
                value = getattr(keys, changed)
                if value != getattr(ActivationKeys(), changed):
                    raise invalid(f"{name}.{changed}", value, 'has no effect with at = "none"', 'at = "children"')
        elif not keys.recompute and not keys.offload:
            raise invalid(f"{name}.recompute", False, f'at = "{keys.at}" then has no effect', "true, or offload = true")
        if keys.save and not keys.recompute:
            raise invalid(f"{name}.save", keys.save, "has no effect without recompute", "recompute = true")

    @property
    def parallel(self) -> Parallelism:
        """The degrees of all axes, and the styles of modules, as one value."""
        keys = {key.name: getattr(self.parallelism, key.name) for key in fields(ParallelismKeys)}
        names = "data_parallel_replicate_degree", "data_parallel_shard_degree"
        return Parallelism(**keys, **{name: getattr(self.sharding, name) for name in names})

    def with_parallel(self, plan: Parallelism) -> ShardingConfig:
        """The same with the axes and styles of `plan`. Raises `ConfigError` where this says something else."""
        if self.parallelism != ParallelismKeys():
            raise ConfigError("parallelism: expected it in the configuration or as an argument, found both; leave one")
        keys = {key.name: getattr(plan, key.name) for key in fields(ParallelismKeys)}
        degrees = {}
        for name in ("data_parallel_replicate_degree", "data_parallel_shard_degree"):
            own, default = getattr(self.sharding, name), getattr(ShardingKeys(), name)
            degrees[name] = getattr(plan, name)
            if own not in (default, degrees[name]):
                problem = f"the parallelism beside it has {degrees[name]}; leave one out"
                raise invalid(f"sharding.{name}", own, problem)
        sharding = replace(self.sharding, **degrees)
        found = replace(self, parallelism=ParallelismKeys(**keys), sharding=sharding)
        found.check_sizes()
        return found

    def degrees(self, world: int) -> tuple[int, int]:
        """(replicate, shard) on `world` ranks: the ranks with copies, and those over which a parameter is cut, which
        are those along `cp` too. Raises `ConfigError` if they do not fit."""
        copies, shard = self._degrees(world)
        for key, kept in self._kept():
            if shard % kept:
                problem = f"expected a factor of the {shard} ranks that share a copy"
                raise invalid(key, kept, problem, _nearest_factor(kept, shard, 2) if shard > 1 else "true")
        return copies, shard

    def _degrees(self, world: int) -> tuple[int, int]:
        if self.parallelism.beyond_data:
            axes = self.parallel.on(world)
            return axes.dp_replicate, axes.shards
        keys = self.sharding
        shard, copies = keys.data_parallel_shard_degree, keys.data_parallel_replicate_degree
        ranks = f"{world} rank" + ("s" if world != 1 else "")
        if copies == -1:
            if world % shard:
                nearest = _nearest_factor(shard, world)
                raise invalid("sharding.data_parallel_shard_degree", shard, f"must divide the {ranks}", nearest)
            copies = world // shard
        if world % copies:
            nearest = _nearest_factor(copies, world)
            raise invalid("sharding.data_parallel_replicate_degree", copies, f"must divide the {ranks}", nearest)
        if shard == -1:
            shard = world // copies
        if shard * copies != world:
            problem = f"with {copies} {'copy' if copies == 1 else 'copies'} there are {shard * copies} of {ranks}"
            raise invalid("sharding.data_parallel_shard_degree", shard, problem, f"{world // copies} (or -1)")
        return copies, shard

    def _kept(self) -> list[tuple[str, int]]:
        """The numbers among the settings of reshard_after_forward, with their keys."""
        found: list[tuple[str, Any]] = [("sharding.reshard_after_forward", self.sharding.reshard_after_forward)]
        found += [
            (f"override[{n}].reshard_after_forward", o.reshard_after_forward) for n, o in enumerate(self.override)
        ]
        return [(key, value) for key, value in found if type(value) is int]


def _goes_with(name: str, value: Any, other: str, choice: str, wanted: str) -> None:
    """`value` is given exactly if `other` is `wanted`."""
    if value and choice != wanted:
        raise invalid(name, value, f'has no effect with {other} = "{choice}"', f'{other} = "{wanted}"')
    if not value and choice == wanted:
        raise ConfigError(f'{other} = "{wanted}": expected {name}, found none; give it')


def _nearest_factor(number: int, of: int, least: int = 1) -> str:
    """The factor of `of` that is nearest to `number`, the lower one of two."""
    factors = [k for k in range(least, of + 1) if of % k == 0]
    return str(min(factors, key=lambda k: (abs(k - number), k)))


def _check_degrees(keys: ShardingKeys) -> None:
    degrees = {
        "sharding.data_parallel_shard_degree": keys.data_parallel_shard_degree,
        "sharding.data_parallel_replicate_degree": keys.data_parallel_replicate_degree,
    }
    for name, degree in degrees.items():
        if degree == 0:
            raise invalid(name, 0, "expected -1 (all that are left) or at least 1", "-1")
    if set(degrees.values()) == {-1}:
        raise invalid(
            "sharding.data_parallel_replicate_degree", -1, "expected one of the two degrees, found -1 for both", "1"
        )
