"""Decides which modules of a model are in which stage of a pipeline, on the whole model, before anything is changed.

The modules are a chain, in the order of the forward: those of `module_fqns_per_model_part`, else the model's own
(`pipeline_modules`), else what Hugging Face's `base_model_pp_plan` names, else the blocks with what is around them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..comm import sum_over
from ..extras.experts import MixtureOfExperts, StageBalance
from ..extras.pipeline import Beside, Parts
from ..extras.pipeline import LossFn as LossFn
from ..extras.pipeline import Pipeline as Pipeline
from ..keys import ConfigError
from ..program import blocks_of
from .axes import Axes
from .config import ShardingConfig
from .initialise import send_values
from .parallelism import Parallelism
from .pipeline_stages import Boundary, leave_out
from .relations import Relations
from .schedules import Cost, Schedule, balanced, find_schedule, stages_of, stages_per_rank
from .stage_ties import SharedParameters, StageTie
from .tree import Tree, class_of, names_above, nearest
from .wrapping import ROOT, UnitPlan

_KEY = "parallelism.module_fqns_per_model_part"


@dataclass(frozen=True)
class Split:
    """The modules of each stage, in order; `own`: the numbers of this rank's stages. `costs`: of each stage."""

    schedule: Schedule
    parts: tuple[tuple[str, ...], ...]
    own: tuple[int, ...]
    costs: tuple[Cost, ...]
    ties: tuple[StageTie, ...] = ()
    # Whether some stage has experts with a balance loss.
    is_balanced: bool = False

    @property
    def chain(self) -> tuple[str, ...]:
        return tuple(name for part in self.parts for name in part)

    def is_own(self, name: str) -> bool:
        """Whether this rank has the module `name`, which is in one of the chain, or is one."""
        above = {*names_above(name)}
        return any(each in above for number in self.own for each in self.parts[number])

    def stage_of(self, name: str) -> int | None:
        """The stage that has the module `name`; None for one around several modules of the chain."""
        above = {*names_above(name)}
        return next((number for number, part in enumerate(self.parts) if above & {*part}), None)

    def lines(self) -> list[str]:
        """Each stage with its modules, elements and share of the work."""
        whole = sum(cost.work for cost in self.costs) or 1
        return [
            f"stage {number}: {_shown(part)} ({cost.size:,} elements, {cost.work / whole:.0%} of the products)"
            for number, (part, cost) in enumerate(zip(self.parts, self.costs, strict=True))
        ]


def split_model(tree: Tree, plan: Parallelism, axes: Axes, place: int) -> Split:
    """The split of a model for the rank at `place` of the pipeline. Raises `ConfigError` for a model that cannot be
    divided so: parameters outside of the chain, fewer layers than stages, stages on one rank that share a parameter."""
    schedule = find_schedule(plan.pipeline_parallel_schedule)
    each = stages_per_rank(schedule, plan.pipeline_parallel_stages_per_rank)
    stages = each * axes.pp
    if plan.module_fqns_per_model_part:
        parts = tuple(tuple(_known(tree, name) for name in part) for part in plan.module_fqns_per_model_part)
    else:
        parts = _balanced(tree, chain_of(tree), stages, axes.pp)
    chain = [name for part in parts for name in part]
    _check_cover(tree, chain)
    reads = _read_elsewhere(tree)
    split = Split(
        schedule,
        parts,
        stages_of(place, axes.pp, each, schedule),
        tuple(_sum(_cost(tree, name, reads) for name in part) for part in parts),
    )
    balanced_by_loss = any(isinstance(module, MixtureOfExperts) and module.balance for module in tree.names)
    return replace(split, ties=tuple(_ties(tree, split, axes, each, reads)), is_balanced=balanced_by_loss)


def chain_of(tree: Tree) -> list[str]:
    """The modules of the model in the order of its forward, as far as the model says it, or its layout."""
    model: Any = tree.model
    own = getattr(model, "pipeline_modules", None)
    if callable(own):
        return list(own())
    blocks = {tree.names[block] for block in blocks_of(model) if block in tree.names}
    theirs = getattr(getattr(model, "config", None), "base_model_pp_plan", None)
    if isinstance(theirs, dict) and theirs:
        prefix = getattr(model, "base_model_prefix", "")
        base = prefix if prefix in tree.modules else ""
        named = [f"{base}.{name}" if base else name for name in theirs]
        chain = [each for name in named if name in tree.modules for each in _members(tree, name)]
        inside = {above for name in chain for above in names_above(name)}
        return chain + [name for name in tree.children() if name not in inside] if chain else _around(tree, "", blocks)
    return _around(tree, "", blocks)


def cost_of(module: nn.Module) -> Cost:
    """Elements of the module, and those that multiply each token: all but tables of embeddings."""
    sizes = {id(p): p.numel() for p in module.parameters()}
    tables = {id(below.weight) for below in module.modules() if isinstance(below, nn.Embedding)}
    return Cost(sum(size for key, size in sizes.items() if key not in tables), sum(sizes.values()))


def _cost(tree: Tree, name: str, reads: Mapping[str, Sequence[str]]) -> Cost:
    own = cost_of(tree.modules[name])
    more = sum(tree.model.get_parameter(each).numel() for each in reads.get(name, ()))
    return Cost(own.work + more, own.size + more)


def _sum(costs: Iterable[Cost]) -> Cost:
    found = list(costs)
    return Cost(sum(cost.work for cost in found), sum(cost.size for cost in found))


def _members(tree: Tree, name: str) -> list[str]:
    module = tree.modules[name]
    if isinstance(module, nn.ModuleList):
        return [f"{name}.{child}" for child, _ in module.named_children()]
    return [name]


def _around(tree: Tree, name: str, blocks: set[str]) -> list[str]:
    """The blocks, and what has parameters beside them and the modules around them; of an nn.Sequential all."""
    module = tree.modules[name]
    found: list[str] = []
    for child, _ in module.named_children():
        below = f"{name}.{child}" if name else child
        if below in blocks:
            found.append(below)
        elif any(block.startswith(f"{below}.") for block in blocks):
            found += _around(tree, below, blocks)
        elif tree.has_parameters(below) or isinstance(module, nn.Sequential):
            found.append(below)
    return found


def _known(tree: Tree, name: str) -> str:
    if name not in tree.modules or not name:
        raise ConfigError(
            f"{_KEY}: expected names of modules of {class_of(tree.model)}, found {name!r}"
            f"{nearest(name, tree.names.values())}"
        )
    return name


def _balanced(tree: Tree, chain: Sequence[str], stages: int, degree: int) -> tuple[tuple[str, ...], ...]:
    known = {*blocks_of(tree.model)}
    blocks = [name for name in chain if tree.modules[name] in known] or list(chain)
    if len(blocks) < stages:
        each = stages // degree
        legal = len(blocks) // each
        nearest_degree = f"pipeline_parallel_degree = {max(legal, 1)}"
        raise ConfigError(
            f"parallelism.pipeline_parallel_degree = {degree}: expected a layer for each of the {stages} stages, found "
            f"{len(blocks)} layers in {class_of(tree.model)}; nearest valid: {nearest_degree}"
        )
    reads = _read_elsewhere(tree)
    begins = balanced([_cost(tree, name, reads) for name in chain], stages)
    return tuple(tuple(chain[a:b]) for a, b in zip(begins, [*begins[1:], len(chain)], strict=True))


def _check_cover(tree: Tree, chain: Sequence[str]) -> None:
    """Every parameter is in one module of the chain, and none of these is inside of another."""
    known = {*chain}
    for name in chain:
        if inner := known & {*list(names_above(name))[1:]}:
            raise ConfigError(f"{_KEY}: expected modules beside each other, found {name} inside of {inner.pop()}")
    for places in tree.slots().values():
        for module, attribute in places:
            if not known & {*names_above(module)}:
                name = f"{module}.{attribute}" if module else attribute
                raise ConfigError(
                    f"parallelism.pipeline_parallel_degree: expected each parameter of {class_of(tree.model)} in a "
                    f"module of a stage, found {name} in none; put it into a module, and name the module in "
                    f"module_fqns_per_model_part"
                )


def _read_elsewhere(tree: Tree) -> dict[str, list[str]]:
    """The parameters that a module reads of others, by its name, as the model says (`pipeline_reads`)."""
    own = getattr(tree.model, "pipeline_reads", None)
    return dict(own()) if callable(own) else {}


def _ties(tree: Tree, split: Split, axes: Axes, each: int, reads: Mapping[str, Sequence[str]]) -> Iterator[StageTie]:
    """The parameters that several stages need. Raises `ConfigError` where two of these are on one rank."""
    on = {n: rank for rank in range(axes.pp) for n in stages_of(rank, axes.pp, each, split.schedule)}
    for places in tree.slots().values():
        names = [f"{module}.{attribute}" if module else attribute for module, attribute in places]
        users = [module for module, _ in places]
        users += [reader for reader, read in reads.items() if not {*names}.isdisjoint(read)]
        stages = sorted({number for user in users if (number := split.stage_of(user)) is not None})
        if len(stages) < 2:
            continue
        source = split.stage_of(places[-1][0])
        assert source is not None
        tie = StageTie(tuple(places), tuple(stages), tuple(on[number] for number in stages), source)
        if len({*tie.ranks}) < len(stages):
            raise ConfigError(
                f"parallelism.pipeline_parallel_schedule = {split.schedule.name}: expected stages that share a "
                f"parameter on different ranks, found {tie} on one rank, which would shard it twice; nearest valid: "
                f'"1F1B", or untie them (tie_word_embeddings = false)'
            )
        yield tie


def refuse_tied_units(split: Split, names: Iterable[str], what: str) -> None:
    """Raise `ConfigError` for a unit of `names`, which are `what`, with one of several names of a parameter that stages
    share."""
    names = [name for name in names if name]
    for tie in split.ties:
        found = [name for name in names for module, _ in tie.places if name in names_above(module)]
        if len(tie.places) > 1 and found:
            raise ConfigError(
                f"{what}: expected the parameter {tie} in the unit of the whole model, because each of them has all "
                f"its names, found the unit {found[0]} with one of them; leave that out, or nearest valid: wrap.ties = "
                f'"lowest_common"'
            )


def check_units(split: Split, names: Iterable[str], what: str) -> None:
    """Raise `ConfigError` for a module of `names`, which are `what`, that is around modules of the chain."""
    for name in names:
        if name and split.stage_of(name) is None and any(each.startswith(f"{name}.") for each in split.chain):
            raise ConfigError(
                f"{what}: expected modules that are inside of one stage of the pipeline, found {name}, which is "
                f"around {_shown([each for each in split.chain if each.startswith(f'{name}.')])}; name what is in it"
            )


def pipeline_of(
    tree: Tree, config: ShardingConfig, axes: Axes, whole: DeviceMesh, plans: Iterable[UnitPlan]
) -> Split | None:
    """The split of the model, None without a pipeline. Collective: ranks with another split raise `ConfigError`."""
    if axes.pp == 1:
        return None
    if config.micro_batches.size:
        raise ConfigError(
            f"micro_batches.size = {config.micro_batches.size}: a pipeline has micro-batches of its own; nearest "
            f"valid: parallelism.pipeline_parallel_microbatch_size = {config.micro_batches.size}"
        )
    if getattr(getattr(tree.model, "config", None), "output_router_logits", False) is True:
        raise ConfigError(
            f"output_router_logits = True of {class_of(tree.model)}: expected no balance loss of its own in a "
            f"pipeline, because it multiplies means over the layers of all stages, of which each has its own; nearest "
            f"valid: output_router_logits = False"
        )
    split = split_model(tree, config.parallel, axes, whole.get_local_rank("pp"))
    names = [name for plan in plans if plan != ROOT for name in plan.modules]
    check_units(split, names, "wrap")
    refuse_tied_units(split, names, "wrap")
    keys = config.parallel
    said = f"{split.parts} {keys.pipeline_parallel_num_microbatches} {keys.pipeline_parallel_microbatch_size} {keys}"
    own = int.from_bytes(hashlib.blake2s(said.encode(), digest_size=3).digest(), "big")
    if dist.get_backend(whole.get_group(0)) != "fake":
        total, squares = sum_over(whole, torch.tensor([own, own * own]), "the plan of a pipeline").tolist()
        if whole.size() * squares != total * total:
            raise ConfigError(
                f"parallelism: expected one plan on all {whole.size()} ranks, found different ones, here {keys!s}; "
                f"give all ranks one configuration"
            )
    return split


def check_reshard(split: Split, reshard: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a unit that is freed after forward, with a schedule that splits the backward."""
    for unit, kept in reshard.items():
        if split.schedule.splits and kept is not False:
            raise ConfigError(
                f"reshard_after_forward = {str(kept).lower()} of {unit}: {split.schedule.name} computes gradients of "
                f"weights apart, for which weights have to stay full; nearest valid: false"
            )


def send_chain(tree: Tree, split: Split, mesh: DeviceMesh) -> None:
    """Give all ranks the values of rank 0, one module after the other, of which each rank keeps its own. Collective."""
    send_values(tree, [""], mesh, {tree.modules[name] for name in split.chain})
    for name in split.chain:
        send_values(tree, [name], mesh, set())
        if not split.is_own(name):
            leave_out(tree.model, name)
            forget(tree, name)


def forget(tree: Tree, left_out: str) -> None:
    """Let go of the modules of another stage, so that their memory is free."""
    for name in [name for name in tree.modules if left_out in names_above(name)]:
        tree.names.pop(tree.modules.pop(name), None)


def own_plans(
    split: Split,
    plans: Iterable[UnitPlan],
    arguments: dict[str, dict[str, Any]],
    divided: dict[str, list[str]],
) -> list[UnitPlan]:
    """The units of this rank's stages; one whose modules are in several stages is a unit in each of them. `arguments`
    and `divided` modules of each unit, by its name, become those of these units."""
    found = []
    for plan in plans:
        names = divided.pop(plan.name)
        by_stage: dict[int | None, list[str]] = {}
        for name in plan.modules:
            if plan == ROOT or split.is_own(name):
                by_stage.setdefault(split.stage_of(name), []).append(name)
        for modules in by_stage.values():
            part = replace(plan, modules=tuple(modules))
            arguments[part.name] = arguments[plan.name]
            own = [name for name in names if split.is_own(name)]
            divided[part.name] = [name for name in own if plan == ROOT or {*names_above(name)} & {*modules}]
            found.append(part)
    return found


def keep_parameters(
    optimizer: torch.optim.Optimizer, tree: Tree, split: Split, shared: Iterable[nn.Parameter] = ()
) -> None:
    """Take the parameters of other stages, and their state, out of an optimizer of the whole model. `shared`: those
    that a stage of this rank has beside its modules'."""
    own = {id(p) for name in split.chain if split.is_own(name) for p in tree.modules[name].parameters()}
    own |= {id(p) for p in shared}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in own:
                optimizer.state.pop(parameter, None)
        group["params"][:] = [parameter for parameter in group["params"] if id(parameter) in own]


def make_pipeline(
    plan: Parallelism,
    split: Split,
    stages: Mapping[int, nn.Module],
    axes: Axes,
    whole: DeviceMesh,
    relations: Relations,
    loss_fn: LossFn | None,
    context: Callable[[], AbstractContextManager[Any]],
    *,
    mean: bool = True,
    parts: Parts | None = None,
    shared: SharedParameters | None = None,
) -> Pipeline:
    """The pipeline of sharded `stages`, by number, whose boundaries are watched from now on. `parts`: cuts batches;
    `shared`: what stages share, sharded too."""
    count = len(split.parts)
    relations.stages = tuple(stages.values())
    balances = {number: StageBalance(stage, is_last=number == count - 1) for number, stage in stages.items()}
    for number, stage in stages.items():
        Boundary(stage, number, count, split.parts[number], balances[number]).install(stage)
    size = plan.pipeline_parallel_microbatch_size
    device = torch.device(whole.device_type)
    if device.type != "cpu":
        device = torch.device(device.type, torch.accelerator.current_device_index())
    needs = {"cut sequences": axes.cp > 1, "tied parameters": split.ties, "balance losses": split.is_balanced}
    made = Pipeline(
        stages,
        count,
        whole.get_group("pp"),
        device,
        schedule=split.schedule.name,
        number=plan.pipeline_parallel_num_microbatches or (0 if size else count),
        size=size,
        loss_fn=loss_fn,
        mean=mean,
        compare=relations.compare_step,
        numbers=lambda samples: split.schedule.numbers(samples, axes.pp, count),
        beside=Beside(
            context,
            parts,
            nullcontext if shared is None or not shared.ties else partial(shared.summed, whole.get_group("pp")),
            tuple(balances.values()),
            " and ".join(what for what, is_there in needs.items() if is_there),
        ),
    )
    here = " and ".join(map(str, stages))
    made.told = [f"pipeline: {split.schedule.name}; this rank has {here} of {count} stages", *split.lines()]
    made.told += [f"shared: {tie}" for tie in split.ties]
    return made


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) < 3 else f"{names[0]} to {names[-1]}"
