"""`prepare_fully_shard`: one call divides, shards and fills a whole model by a configuration, and tells what it did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from ..api import fully_shard, rebind_optimizer
from ..api.validate import resolve_mesh
from ..engine.names import clean_name
from ..engine.unit import module_units
from ..extras import MicroBatches
from ..extras.experts import balance_loss
from ..extras.pipeline import LossFn, Pipeline, whole_loss
from ..keys import ConfigError
from ..policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from ..policy.arguments import expect, expect_callable, expect_flag, expect_module, expect_optimizers
from ..policy.options import Chosen as CastFn
from ..policy.options import check_cast_inputs, check_known_names
from .activations import checkpoint_by_config
from .axes import Axes
from .compilation import compile_block, is_block, refuse_faults
from .config import AUTO, DEFAULT, Override, ShardingConfig
from .experts import (
    ExpertDivision,
    apply_experts,
    divide_experts,
    divide_gradients,
    expert_units,
    find_experts,
    shape_with_experts,
    unit_arguments,
)
from .initialise import Init, fill, send_values, source_of
from .kept import kept_modules, kept_names, policy_that_keeps
from .meshes import Meshes, build_meshes, check_mesh
from .parallelism import Parallelism
from .parallelism_config import ParallelismSizes, is_parallelism_config, of_accelerate
from .pipeline import (
    check_reshard,
    keep_parameters,
    make_pipeline,
    own_plans,
    pipeline_of,
    send_chain,
)
from .pipeline_stages import keep_stages
from .reading import read_config
from .relations import Relations
from .sequences import ContextParallel, parts_of_step, running, sequences_of
from .stage_ties import SharedParameters
from .states import in_form
from .table import UnitRow, rows_of, table_of
from .tensor_parallel import Division, Replaced, apply_styles, divide, shape_for, shape_of
from .ties import Tie, refuse_untied, resolve_ties
from .tree import Tree, class_of, names_above, nearest
from .wrapping import ROOT, UnitPlan, WrapFn, choose_units, inner_first

# ---- the result ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prepared:
    """The result of `prepare_fully_shard`, as data; `str` prints it.

    source: where values came from, "auto" resolved. checkpointed: modules whose activations are not kept. kept: modules
    that compute in the dtype of their parameters, by `precision.keep_float32`, in units that compute in a lower one.
    uninitialised: names that nothing wrote; the first forward refuses them. optimizers: those that were given, on the
    sharded parameters. micro_batches: the `MicroBatches` of the configuration, None for whole batches.
    axes: the axes of the parallelism, division: the style of each module, whole: the mesh of all axes.
    sequences: what `context` returns.
    pipeline: the stages of this rank with their schedule, None without; `model` then has their modules alone, under the
    names of the whole model. loss_fn: what `step` and `evaluate` call with outputs and targets.
    """

    model: nn.Module
    config: ShardingConfig
    mesh: DeviceMesh
    units: tuple[UnitRow, ...]
    ties: tuple[Tie, ...]
    source: str
    checkpointed: tuple[str, ...]
    kept: tuple[str, ...]
    uninitialised: tuple[str, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]
    micro_batches: MicroBatches | None
    axes: Axes
    division: Division
    whole: DeviceMesh
    sequences: ContextParallel
    pipeline: Pipeline | None = None
    loss_fn: LossFn | None = None

    def step(self, *args: Any, target: Tensor, **kwargs: Any) -> Tensor:
        """Forward, `loss_fn` and backward of this rank's share of a batch; returns the loss, (), without a gradient.

        By the schedule of the pipeline (`Pipeline.step`, which has what it raises); without one, of the whole share at
        once. Sequences are whole; over `cp` they are cut, with positions for models that take `position_ids` or
        `positions`. `loss_fn` takes the mean over samples; balance losses of `MixtureOfExperts` are added. The
        optimizer's step is the caller's.
        """
        if self.pipeline is not None:
            return self.pipeline.step(*args, target=target, **kwargs)
        with self._running():
            loss = self._loss(args, kwargs, target)
            loss.backward()
        return whole_loss(loss)

    @torch.no_grad()
    def evaluate(self, *args: Any, target: Tensor, **kwargs: Any) -> Tensor:
        """The loss of this rank's share of a batch without gradients, the same on all ranks of a pipeline."""
        if self.pipeline is not None:
            return self.pipeline.evaluate(*args, target=target, **kwargs)
        with self._running():
            return whole_loss(self._loss(args, kwargs, target))

    def _running(self) -> AbstractContextManager[None]:
        found: AbstractContextManager[None] = running(self.sequences, head=bool(self.division.head))()
        return found

    def _loss(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Tensor) -> Tensor:
        if self.loss_fn is None:
            raise ValueError(
                "loss_fn: expected a function of (output, target), found none; pass it to prepare_fully_shard"
            )
        parts = parts_of_step(self.model, self.sequences)
        if parts is not None:
            args, kwargs, target = parts(args, kwargs, target, 1)
        output = self.model(*args, **kwargs)
        loss = self.loss_fn(getattr(output, "logits", output), target)
        balance = balance_loss(self.model) if torch.is_grad_enabled() else 0.0
        if isinstance(balance, Tensor):
            loss = (loss.full_tensor() if isinstance(loss, DTensor) else loss) + balance
        return loss

    @property
    def share(self) -> tuple[int, int]:
        """Returns which share of each batch this rank gets, and how many there are: along other axes the same."""
        return self.axes.share(self.whole.mesh.flatten().tolist().index(self.whole.get_rank()))

    def context(self) -> ContextParallel:
        """Where forward, loss and backward run. It cuts whole batches over the ranks of `cp`, if there are any:

            with prepared.context() as cp:
                inputs, labels = cp.split((tokens[:, :-1], tokens[:, 1:]))
                logits = model(inputs, cp.positions(length))
                F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()

        Inside, attention is over whole sequences, and the mean of a cross entropy over all their tokens, the same on
        each of these ranks. Without `cp` all of it is torch's, so that one program runs with any degree. The result is
        the same each time; `context_parallel` describes it.
        """
        return self.sequences

    def loss_context(self) -> AbstractContextManager[Any]:
        """Where the loss and its backward run: torch's `loss_parallel`, if logits stay cut along the vocabulary."""
        return loss_parallel() if self.division.head else nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """The model's state dict in the form that `config.state_dict` asks for. Collective for "full", which gathers
        one tensor after the other; with `rank0_only` the other ranks get {}."""
        keys = self.config.state_dict
        ranks = self.whole.mesh.flatten().tolist()
        place = ranks.index(self.whole.get_rank())
        # Of a pipeline the first rank of each stage, which has other tensors.
        others = ("dp_replicate", "dp_shard", "cp", "tp")
        keep = not keys.rank0_only or self.axes.group(place, *others)[0] == place
        full, state = keys.kind == "full", self.model.state_dict()
        return in_form(state, full=full, offload_to_cpu=keys.offload_to_cpu, keep=keep)

    def __str__(self) -> str:
        lines = table_of(self.units)
        sizes = "x".join(map(str, self.mesh.mesh.shape))
        lines += [str(tie) for tie in self.ties]
        lines.append(f"mesh: {sizes} {self.mesh.device_type}; values: {self.source}")
        if self.config.parallelism.beyond_data:
            lines += self.axes.lines()
        if self.pipeline is not None:
            lines += self.pipeline.told
        if self.division.styles:
            lines += ["layers:", *(f"  {line}" for line in self.division.lines())]
        if self.kept:
            counts = Counter(class_of(self.model.get_submodule(name)) for name in self.kept)
            shown = ", ".join(f"{count} {name}" for name, count in counts.items())
            lines.append(f"computed in the dtype of their parameters: {shown}")
        if self.checkpointed:
            lines.append(f"activations not kept: {', '.join(self.checkpointed)}")
        if self.uninitialised:
            lines.append(f"not initialised: {', '.join(self.uninitialised)}")
        return "\n".join(lines)


# ---- the call --------------------------------------------------------------------------------------------------------


def prepare_fully_shard(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    config: ShardingConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    mesh: DeviceMesh | None = None,
    parallelism: Parallelism | Mapping[str, Any] | ParallelismSizes | None = None,
    wrap_fn: WrapFn | None = None,
    init: Init | None = None,
    cast_fn: CastFn | None = None,
    loss_fn: LossFn | None = None,
    show: bool = True,
) -> Prepared:
    """Shard a whole model as `config` says: units, ties, precision, offload, initial values, activations, optimizers.

        optimizer = torch.optim.AdamW(model.parameters())  # or afterwards
        prepared = fullshard.prepare_fully_shard(model, optimizer, {"precision": "DEFAULT", "wrap": ["Block"]})

    model: the plain model, on the CPU, the device, or the meta device. It stays the same object, as with `fully_shard`.
    optimizer: one or several that were built before; they continue with the sharded parameters (`rebind_optimizer`).
    config: a dict, the path of a TOML, JSON or YAML file, or a `ShardingConfig`; None takes the defaults: the model's
        blocks as units, all ranks, the dtypes of the parameters. docs/prepare.md lists the keys.
    mesh: 1-D (shard) or 2-D (replicate, shard), instead of the degrees of the configuration; with tensor parallelism
        that was applied before, the data-parallel axes of its mesh; with `parallelism`, those of a mesh with its axes.
    parallelism: the degrees of all axes and the styles of modules, instead of the section of the configuration; also
        Accelerate's `ParallelismConfig`. One
        mesh is built; layers are divided over `tp`, before activations, sharding and the optimizer, which all may be
        asked for in any order; what a forward gets is compared along the axes (docs/parallelism.md).
    wrap_fn: (name, module) -> True, False, or arguments of `fully_shard` as a dict, for `wrap.by = "function"`.
    init: initialises a module's own tensors, for models on the meta device (`materialize`).
    cast_fn: (name of an argument, tensor) -> whether it is cast to the compute dtype, for the units whose inputs
        `precision.cast_inputs` lets be cast; for names alone, write them there.
    loss_fn: (output, target) -> the mean loss of samples, (), for `Prepared.step`; a pipeline needs it
        (docs/how-to/pipeline-parallelism.md).
    show: the first rank prints the table of units.

    Everything that can be decided is decided and checked before the model is changed: units, ties, degrees, overrides,
    ignored names, and where values come from. Collective. Raises `ConfigError` for the configuration, and `ValueError`
    for a model that does not fit it: nothing matched, a name or class that is not there, an override of no unit, tied
    parameters that are to be refused, values on the wrong ranks, an optimizer of other parameters. Errors of
    `fully_shard`, `materialize` and `load_pretrained` pass through. Source: seed 004, which promises it to users of
    Composer's FSDP1 wrapper.
    """
    expect_module("model", model)
    expect_flag("show", show)
    expect_callable("init", init, "a function of a module", or_none=True)
    expect_callable("cast_fn", cast_fn, "a function of (name of an argument, tensor)", or_none=True)
    expect_callable("wrap_fn", wrap_fn, "a function of (name, module)", or_none=True)
    expect_callable("loss_fn", loss_fn, "a function of (output, target)", or_none=True)
    expect("mesh", mesh is None or isinstance(mesh, DeviceMesh), "a DeviceMesh or None", mesh, "use init_device_mesh")
    optimizers = () if optimizer is None else tuple(expect_optimizers("optimizer", optimizer))
    config = read_config(config)
    if parallelism is not None:
        config = config.with_parallel(_plan(parallelism))
    _refuse_sharded(model)
    tree = Tree(model)
    plans, ties = resolve_ties(tree, choose_units(tree, config.wrap, wrap_fn), config.wrap.ties)
    names = find_experts(tree, config.parallel)
    plans = expert_units(tree, names, [*inner_first(tree, plans), ROOT])
    overrides = _overrides_by_unit(tree, plans, config.override)
    ignored = _ignored(tree, config.wrap.ignored)
    _refuse_strangers(model, optimizers)
    axes, division, (whole, mesh), experts = _parallel(tree, config, mesh, names)
    refuse_faults(tree, config, division)
    split = pipeline_of(tree, config, axes, whole, plans)
    masters = _masters(model, config.precision.master, ignored)
    arguments = {plan.name: _arguments(plan, config, overrides[plan.name], mesh, ignored) for plan in plans}
    for plan in plans if cast_fn is not None else ():
        policy = arguments[plan.name]["mp_policy"]
        if policy.cast_forward_inputs is True and "mp_policy" not in plan.arguments:
            arguments[plan.name]["mp_policy"] = replace(policy, cast_forward_inputs=cast_fn)
    for name in experts.names:
        arguments[name] |= unit_arguments(tree.modules[name], experts, arguments[name]["mp_policy"])
    _check_cast_inputs(tree, arguments, {plan.name: plan.modules for plan in plans})
    kept = kept_modules(tree, plans, arguments, config.precision.keep_float32, masters)
    for plan in plans:
        arguments[plan.name] |= policy_that_keeps(arguments[plan.name]["mp_policy"], kept[plan.name])
    if split is not None:
        check_reshard(split, {name: given.get("reshard_after_forward") for name, given in arguments.items()})
    everyone = mesh if whole is mesh else resolve_mesh(None)
    source = source_of(model, config.initialisation, everyone)

    for parameter, dtype in masters.items():  # the same objects, so that ties and optimizers keep them
        parameter.data = parameter.data.to(dtype)
    checkpointed = checkpoint_by_config(model, plans, config.activation_checkpointing)
    units = {tree.modules[name] for plan in plans for name in plan.modules} if split is None else set()
    divided, replaced = _divided_in(tree, plans, division), Replaced()
    names_kept = kept_names(tree, plans, kept)
    stages = {0: model}
    shared = SharedParameters(tree, split.ties if split is not None else (), split.own if split is not None else ())
    if split is not None:
        for one in optimizers:
            keep_parameters(one, tree, split, shared.held.values())
        if source in ("cpu", "mixed"):
            send_chain(tree, split, everyone)
        stages = keep_stages(model, split.chain, {number: split.parts[number] for number in split.own})
        plans = own_plans(split, plans, arguments, divided)
    for plan in plans:
        modules = [tree.modules[name] for name in plan.modules]
        if source in ("cpu", "mixed") and split is None:
            send_values(tree, plan.modules, everyone, units - {*modules})
        apply_styles(tree, division, divided[plan.name], whole["tp"] if division.styles else whole, replaced)
        if plan.why == "experts":
            apply_experts(tree, experts, plan.modules, whole, replaced, divided=division.sequence)
        if ignored:
            successors = replaced.successors()
            arguments[plan.name]["ignored_params"] = {successors.get(id(p), p) for p in ignored}
        if config.wrap.compile and is_block(plan):
            compile_block(modules[0], config.wrap.compile)
        if plan == ROOT:
            shared.place(model, stages)
        for unit in [[stage] for stage in stages.values()] if plan == ROOT else [modules]:
            fully_shard(unit[0] if len(unit) == 1 else unit, **arguments[plan.name])
    here = [name for name in experts.names if split is None or split.is_own(name)]
    divide_gradients((tree.modules[name] for name in here), axes)
    together = model if len(stages) == 1 else nn.ModuleList(stages.values())
    # Initialisers are seeded by names, which those of a stage are.
    filled = list(stages.values()) if source == "meta" else [together]
    uninitialised = tuple(
        name for part in filled for name in fill(part, source, config.initialisation, init, progress=show)
    )
    for one in optimizers:
        replaced.rebind(one)
        rebind_optimizer(one, together)
    sequences = sequences_of(axes, whole, mesh, config.parallelism.context_parallel_variant, model)
    pipeline = None
    if split is not None:
        relations = Relations(None, axes, whole, sequence=division.sequence, sequences=sequences)
        context, parts = running(sequences, head=bool(division.head)), parts_of_step(model, sequences)
        shared.begin(stages, whole.get_group("pp"))
        given = config.parallel, split, stages, axes, whole, relations, loss_fn, context
        pipeline = make_pipeline(*given, parts=parts, shared=shared)
    elif config.parallelism.beyond_data:
        Relations(model, axes, whole, sequence=division.sequence, sequences=sequences)
    refuse_untied(ties, model)
    prepared = Prepared(
        model,
        config,
        mesh,
        tuple(row for stage in stages.values() for row in rows_of(Tree(stage), plans, arguments)),
        tuple(ties),
        source,
        checkpointed,
        names_kept,
        uninitialised,
        optimizers,
        _micro_batches(model, config),
        axes,
        division,
        whole,
        sequences,
        pipeline,
        loss_fn,
    )
    if show and dist.get_rank() == whole.mesh.flatten()[0]:
        print(prepared)
    return prepared


# ---- decisions -------------------------------------------------------------------------------------------------------


def _refuse_sharded(model: nn.Module) -> None:
    if module_units(model):
        names = [name or "the model" for name, module in model.named_modules() if module_units(module)]
        raise ValueError(
            f"model: expected one that is not sharded yet, found fully_shard applied in {names[0]}; call "
            f"prepare_fully_shard once, on the plain model"
        )


def _refuse_strangers(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Before anything is changed: `rebind_optimizer` tells the rest."""
    own = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not any(id(parameter) in own for parameter in given):
            raise ValueError(
                f"optimizer: expected a {type(optimizer).__name__} over parameters of this {class_of(model)}, found "
                f"{len(given)} tensors and none of them; build it from model.parameters(), after parallelize_module"
            )


def _plan(parallelism: Any) -> Parallelism:
    if isinstance(parallelism, Parallelism):
        return parallelism
    if is_parallelism_config(parallelism):
        return of_accelerate(parallelism)
    if not isinstance(parallelism, Mapping):
        raise ConfigError(
            f"parallelism: expected a Parallelism, a table of its keys or Accelerate's ParallelismConfig, found "
            f"{parallelism!r}"
        )
    return read_config({"parallelism": parallelism}).parallel


def _parallel(
    tree: Tree, config: ShardingConfig, mesh: DeviceMesh | None, names: Sequence[str]
) -> tuple[Axes, Division, Meshes, ExpertDivision]:
    """The axes, how they divide the model, and the meshes; without axes beside those of data parallelism as ever."""
    plan = config.parallel
    if not config.parallelism.beyond_data:
        data = _mesh(config, mesh)
        copies, shard = data.size(0) if data.ndim == 2 else 1, data.size(data.ndim - 1)
        return Axes(dp_replicate=copies, dp_shard=shard), Division({}), Meshes(data, data), ExpertDivision()
    division = divide(tree, plan)
    everyone = resolve_mesh(None)
    shape = shape_for(tree, division, shape_of(tree.model))
    if names:
        shape = shape_with_experts(tree, names, shape, sequence=division.sequence)
    axes = plan.on(everyone.size(), shape)
    config.degrees(everyone.size())
    meshes = build_meshes(axes, everyone.device_type) if mesh is None else check_mesh(mesh, axes)
    return axes, division, meshes, divide_experts(names, axes, meshes.whole)


def _divided_in(tree: Tree, plans: Iterable[UnitPlan], division: Division) -> dict[str, list[str]]:
    """The names of the divided modules in each unit, by its name: of the nearest unit around them."""
    owners = {tree.modules[name]: plan.name for plan in plans for name in plan.modules}
    found: dict[str, list[str]] = {name: [] for name in owners.values()}
    for name in division.styles:
        above = (tree.modules[outer] for outer in names_above(name))
        found[next(owners[module] for module in above if module in owners)].append(name)
    return found


def _mesh(config: ShardingConfig, mesh: DeviceMesh | None) -> DeviceMesh:
    """The mesh that was given, which the degrees may not contradict; or one of all ranks, by degrees."""
    if mesh is not None:
        mesh = resolve_mesh(mesh)
        copies, shard = mesh.size(0) if mesh.ndim == 2 else 1, mesh.size(mesh.ndim - 1)
        keys = config.sharding
        if (keys.data_parallel_shard_degree, keys.data_parallel_replicate_degree) == (-1, 1):
            # Not asked for; numbers of ranks to reshard to are checked against the mesh.
            keys = replace(keys, data_parallel_shard_degree=shard, data_parallel_replicate_degree=copies)
        wanted = replace(config, sharding=keys).degrees(mesh.size())
        if wanted != (copies, shard):
            raise ConfigError(
                f"mesh: expected {wanted[0]} x {wanted[1]} (replicate x shard), as the degrees say, found {copies} x "
                f"{shard}; leave one of the two out"
            )
        return mesh
    everyone = resolve_mesh(None)
    copies, shard = config.degrees(everyone.size())
    if copies == 1:
        return everyone
    return init_device_mesh(everyone.device_type, (copies, shard), mesh_dim_names=("replicate", "shard"))


def _ignored(tree: Tree, patterns: Iterable[str]) -> set[nn.Parameter]:
    names = {clean_name(name): p for name, p in tree.model.named_parameters(remove_duplicate=False)}
    found: set[nn.Parameter] = set()
    for pattern in patterns:
        matched = {p for name, p in names.items() if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")}
        if not matched:
            raise ValueError(
                f"wrap.ignored: expected names of parameters or modules of {class_of(tree.model)}, found {pattern!r}, "
                f"which matches none{nearest(pattern, names)}"
            )
        found |= matched
    return found


def _masters(model: nn.Module, master: str, ignored: set[nn.Parameter]) -> dict[nn.Parameter, torch.dtype]:
    """The parameters that get the dtype `master`: trainable ones that are sharded."""
    if master == DEFAULT:
        return {}
    sharded = (p for p in model.parameters() if p not in ignored)
    return {p: getattr(torch, master) for p in sharded if p.requires_grad and p.is_floating_point()}


def _overrides_by_unit(
    tree: Tree, plans: Iterable[UnitPlan], overrides: Iterable[Override]
) -> dict[str, list[Override]]:
    """The overrides of each unit, by its name. Raises `ValueError` for one that is of no unit."""
    found: dict[str, list[Override]] = {plan.name: [] for plan in plans}
    for number, override in enumerate(overrides):
        wanted = {*tree.matching(override.modules), *tree.of_class(override.modules)}
        wanted |= {""} if override.modules in ("root", class_of(tree.model)) else set()
        of = [plan for plan in plans if wanted & {*plan.modules}]
        if not of:
            units = [name or "root" for plan in plans for name in plan.modules]
            raise ValueError(
                f"override[{number}].modules: expected names or the class of units, found {override.modules!r}, which "
                f"is none of them{nearest(override.modules, units)}"
            )
        for plan in of:
            found[plan.name].append(override)
    return found


def _arguments(
    plan: UnitPlan,
    config: ShardingConfig,
    overrides: Iterable[Override],
    mesh: DeviceMesh,
    ignored: set[nn.Parameter],
) -> dict[str, Any]:
    """The arguments of one call of `fully_shard`: the sections, then the overrides, then the function's own."""
    sharding, precision, output = config.sharding, config.precision, config.precision.output
    reshard = sharding.reshard_after_forward
    pipelined = config.parallelism.pipeline_parallel_degree > 1
    if reshard == DEFAULT and (plan.last or pipelined):
        # Backward would gather it again at once; a pipeline would gather it for each micro-batch.
        reshard = False
    output = output if plan == ROOT else DEFAULT
    optional = False
    for override in overrides:
        given = {key.name: getattr(override, key.name) for key in fields(Override)[1:]}
        given = {key: value for key, value in given.items() if value is not None}
        reshard = given.get("reshard_after_forward", reshard)
        output = given.get("output", output)
        optional = given.get("optional", optional)
        sharding = replace(sharding, cpu_offload=given.get("cpu_offload", sharding.cpu_offload))
        own = {key: value for key, value in given.items() if key in ("param", "reduce", "cast_inputs")}
        precision = replace(precision, **own)
    compute, reduce, output_dtype = (
        None if name is None else getattr(torch, name) for name in replace(precision, output=output).dtypes
    )
    return {
        "mesh": mesh,
        "reshard_after_forward": None if reshard == DEFAULT else reshard,
        "mp_policy": MixedPrecisionPolicy(compute, reduce, output_dtype, precision.cast_inputs),
        "offload_policy": CPUOffloadPolicy(sharding.pin_memory) if sharding.cpu_offload else OffloadPolicy(),
        "ignored_params": ignored or None,
        **({"optional": True} if optional else {}),
        **plan.arguments,
    }


def _check_cast_inputs(
    tree: Tree, arguments: Mapping[str, Mapping[str, Any]], modules: Mapping[str, Iterable[str]]
) -> None:
    """Raise `ValueError` for a name of `precision.cast_inputs` that is an argument of no unit's forward."""
    options = {unit: given["mp_policy"].cast_forward_inputs for unit, given in arguments.items()}
    for option in options.values():
        check_cast_inputs("precision.cast_inputs", option)
    check_known_names(
        "precision.cast_inputs",
        [(option, [tree.modules[name] for name in modules[unit]]) for unit, option in options.items()],
    )


def _micro_batches(model: nn.Module, config: ShardingConfig) -> MicroBatches | None:
    keys = config.micro_batches
    if keys.size == 0:
        return None
    reduce: Any = keys.reduce
    if keys.size == AUTO:
        return MicroBatches(model, reduce=reduce)
    return MicroBatches(model, size=int(keys.size), search="fixed", reduce=reduce)
