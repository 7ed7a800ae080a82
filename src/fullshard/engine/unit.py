"""One `fully_shard` call at run time: its modules, param groups and lifecycle record, and the objects it owns.

settings     what the user chose                              api
record       its lifecycle state                              the rules (schedule/), and settings that they read
channels     its collectives                                  channels.py
gradients    arrived and missing gradients                    gradients.py
seal         what the gathered shards were                    seal.py
reads        whether saved weights are watched                backward.py
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import nn

from .._torch import grad_dtype_of
from ..comm import BufferPool, HostLink, Links, Reduction
from ..layout import UnitMemory
from ..param import (
    DtypeChanged,
    ExtensionGroup,
    Found,
    ParamGroup,
    Placing,
    ShardedParam,
    extended_since,
    has_extension,
    holds_bits,
    local_data,
    note_initial,
    set_apart,
)
from ..policy import Controls, Offload, Options, Precision, Wanted, resolve_precision, wanted_of
from ..policy.options import GradDtype, MixedPrecisionLike
from ..schedule import Full, RunRecord, UnitRecord
from .channels import UnitChannels, UnitGradients
from .names import clean_name
from .optimizer_steps import follow_steps, note_full
from .seal import Seal
from .seam import NOBODY, Companion
from .stream import ModelStream

# ---- grouping --------------------------------------------------------------------------------------------------------
# Which parameters of a unit travel together: each group has one mesh, and parameters of equal dtypes.
#
# Several dtypes in a unit are several groups, each with its own flat buffer and messages: storage dtypes, compute
# dtypes that `param_dtype_override_fn` chose, and `grad_dtype` of parameters. Packed bits and numbers are apart, and
# each tensor extension is alone.


def grouped(
    found: Sequence[Found], placing: Placing, policy: MixedPrecisionLike, follows: str
) -> Iterator[tuple[list[Found], ParamGroup]]:
    """The groups of `found`, in the order of their first parameters. `follows`: as in `Wanted`.

    Calls the policy's `param_dtype_override_fn` with each parameter, in their order; `ValueError` for a wrong result.
    """
    wanted = [wanted_of(policy, item.parameter, item.name, follows) for item in found]
    # A cast would destroy packed bits.
    wanted = [Wanted(follows=follows) if holds_bits(f.parameter) else w for f, w in zip(found, wanted, strict=True)]
    wanted = _reduced_together([f.parameter for f in found], wanted)
    groups: dict[object, list[Found]] = {}
    precisions: dict[object, Precision] = {}
    for item, each in zip(found, wanted, strict=True):
        alone = has_extension(item.parameter, item.name)
        key: object = id(item) if alone else (item.parameter.dtype, holds_bits(item.parameter), each)
        groups.setdefault(key, []).append(item)
        precisions[key] = resolve_precision(each, item.parameter.dtype)
    for key, same in groups.items():
        yield same, _group(same, precisions[key], placing, policy)


def _reduced_together(parameters: Sequence[nn.Parameter], wanted: Sequence[Wanted]) -> list[Wanted]:
    """`wanted` of each of `parameters`, which knows of the others that are reduced in the same dtype."""
    kinds: dict[torch.dtype, dict[GradDtype, None]] = {}
    for parameter, each in zip(parameters, wanted, strict=True):
        if parameter.requires_grad:
            kinds.setdefault(parameter.dtype, {})[each.grad_dtype] = None
    found = []
    for parameter, each in zip(parameters, wanted, strict=True):
        beside = tuple(kind for kind in kinds.get(parameter.dtype, ()) if kind != each.grad_dtype)
        found.append(each._replace(beside=beside))
    return found


def _group(found: Sequence[Found], precision: Precision, placing: Placing, policy: Any) -> ParamGroup:
    if has_extension(found[0].parameter, found[0].name):
        return ExtensionGroup(found, precision, placing, policy)
    return ParamGroup(found, precision, placing)


def regrouped(groups: Sequence[ParamGroup]) -> list[tuple[int, ParamGroup]] | None:
    """The groups anew, each with the position of the one that it was part of, if the user set or changed the
    `grad_dtype` of sharded parameters since `groups` were made; else None."""
    found = [[grad_dtype_of(param.sharded) for param in group.params] for group in groups]
    if all(kind == group.precision.wanted.grad_dtype for group, row in zip(groups, found, strict=True) for kind in row):
        return None
    wanted: dict[int, Wanted] = {}
    for placing in {id(group.placing): group.placing for group in groups}.values():
        params = [
            (param.sharded, group.precision.wanted._replace(grad_dtype=kind))
            for group, row in zip(groups, found, strict=True)
            if group.placing is placing
            for param, kind in zip(group.params, row, strict=True)
        ]
        together = _reduced_together([parameter for parameter, _ in params], [each for _, each in params])
        wanted |= {id(parameter): each for (parameter, _), each in zip(params, together, strict=True)}
    made = []
    for position, group in enumerate(groups):
        parts: dict[Wanted, list[Any]] = {}
        for param in group.params:
            parts.setdefault(wanted[id(param.sharded)], []).append(param)
        for each, same in parts.items():
            precision = resolve_precision(each, group.precision.storage)
            made.append((position, group.converted(precision, None if len(parts) == 1 else same)))
    return made


# ---- sizes -----------------------------------------------------------------------------------------------------------
# Bytes of one param group, from its layout; the same on every rank.


def memory_of(group: ParamGroup) -> UnitMemory:
    """The memory of the all-gather of `group`."""
    storage, compute, wire = (group.precision.storage, group.precision.compute, group.precision.wire)
    sizes = storage.itemsize, compute.itemsize, wire.itemsize
    return UnitMemory("", group.pack, group.plan, *sizes, stays=group.memory.keeps)


def gather_nbytes(group: ParamGroup) -> int:
    """Bytes that the all-gather of `group` takes."""
    if group.shares_memory:
        return 0
    memory = memory_of(group)
    # Shards on the host are copied to the device first.
    return memory.gather_nbytes + (memory.shard_nbytes if group.placing.offload.to_host else 0)


# ---- in flight -------------------------------------------------------------------------------------------------------
# Message buffers and in-flight reductions, which roots may share.
#
# Each root has its own unless `share_comm_ctx` joins them, like the stages of a pipeline: then stages with equal
# layouts reuse buffers, and the limit on reductions holds for all of them together. (torch shares streams instead; here
# messages are issued in the order of the compute stream.)


class InFlight(NamedTuple):
    """One reduction in flight, and the parameters whose gradients it carries."""

    owner: object
    unit: Unit
    group: ParamGroup
    trainable: tuple[int, ...]
    reduction: Reduction


class Shared:
    """The message buffers and in-flight reductions of one or more roots. `keep`: as in `BufferPool`."""

    def __init__(self, *, keep: bool) -> None:
        self.pool = BufferPool(keep=keep)
        # Reductions in flight over the shards, and among the replicas: each in command order, the order of messages on
        # every rank.
        self.in_flight: deque[InFlight] = deque()
        self.replicating: deque[InFlight] = deque()
        # Both, in the order of a reduction's messages.
        self.all_in_flight = self.in_flight, self.replicating
        # The handle of `finalize_backward(async_op=True)`, if one of the roots left reductions under way.
        self.finalizing: object | None = None


# ---- unit ------------------------------------------------------------------------------------------------------------

_ATTRIBUTE = "_fullshard_unit"
# Forwards with gradients during which saved weights are watched (engine/backward.py).
HOOKED_FORWARDS = 2


def unit_of(module: nn.Module) -> Unit | None:
    """The unit to which `module` itself belongs, or None."""
    return cast("Unit | None", module.__dict__.get(_ATTRIBUTE))


def module_units(module: nn.Module) -> list[Unit]:
    """The units of `module` and its submodules, each once."""
    return list(dict.fromkeys(unit for child in module.modules() if (unit := unit_of(child)) is not None))


class Part(NamedTuple):
    """Parameters of a unit that share a mesh. They form one param group per dtype."""

    found: Sequence[Found]
    placing: Placing
    links: Links


@dataclass
class UnitSettings:
    """The user's settings of one unit. `reshard_after_forward`: None means True unless the unit becomes the root.
    `notes_values`: digests of the full parameters were noted, to compare them across ranks."""

    policy: MixedPrecisionLike
    reshard_after_forward: bool | None
    notes_values: bool = False
    # Whether only some ranks run it in a step.
    optional: bool = False
    # Names of ignored parameters below the module.
    ignored_names: tuple[str, ...] = ()
    # How gradients are reduced, and whether they are all-reduced among replicas.
    controls: Controls = Controls()
    all_reduces: bool = True
    # Whether the bytes of full parameters stay between uses.
    keeps_storage: bool = False
    # Only for the root: whether the next backward ends the step, or `finalize_backward` does; shared buffers; the event
    # its next forward waits for; byte limits of prefetched gathers, and of gradients with their messages (None:
    # default).
    is_last_backward: bool = True
    manual_finalization: bool = False
    shared: Shared | None = None
    post_optim_event: torch.Event | None = None
    prefetch_nbytes: int | None = None
    gradient_nbytes: int | None = None
    # Makes the companion of the root that it becomes.
    accompany: Callable[[AnyRoot], Companion] = lambda _: NOBODY


@dataclass
class Reads:
    """Reads of a unit's saved weights. `left`: more forwards to watch; `is_irregular`: watch all, because backward
    read weights without a report; `is_on`: the last forward with gradients was watched."""

    left: int = HOOKED_FORWARDS
    is_irregular: bool = False
    is_on: bool = False


class AnyRoot(Protocol):
    """The interface of a root (root.py) for units and for code that only knows units."""

    units: list[Unit]
    run: RunRecord
    options: Options
    companion: Companion
    thread: int
    provisional: bool
    # Whether parameters or buffers may be uninitialised, which the next forward checks.
    some_unproven: bool
    # The stream of its commands, on a device.
    stream: ModelStream | None

    def reshard(self, unit: Unit) -> None: ...
    def wait_unshard(self, unit: Unit) -> None: ...
    def settings_change(self, unit: Unit, controls: Controls) -> None: ...
    def met_by_hand(self, *, renewed: bool) -> None: ...
    def repaired(self, unit: Unit) -> None: ...


class Unit:
    """`modules`: usually one. The modules of `fully_shard([a, b])` share everything, and each may run by itself."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        parts: Sequence[Part],
        *,
        device: torch.device,
        policy: MixedPrecisionLike,
        reshard_after_forward: bool | None,
        communication: str,
        reduce_default: str,
        note_values: bool = False,
    ) -> None:
        """`communication`, `reduce_default`: of the options."""
        self.modules = tuple(modules)
        # Where it computes.
        self.device = device
        self.settings = UnitSettings(policy, reshard_after_forward, note_values)
        name = "+".join(type(module).__name__ for module in self.modules)
        self.record = UnitRecord(name, 0, reshard_after_forward=reshard_after_forward is not False)
        self.groups: list[ParamGroup] = []
        # The ranks that each group communicates with, under the strategy of its channels.
        self.links: list[Links] = []
        for part in parts:
            for same, group in grouped(part.found, part.placing, policy, reduce_default):
                self.groups.append(group)
                self.links.append(part.links.under(communication))
                if note_values and part.placing.mesh.size() > 1 and not isinstance(group, ExtensionGroup):
                    note_initial(group.params, same)
        self.record.empty = not self.groups
        self.record.plan.keeps_secondary = any(links.block is not None for links in self.links)
        # The root that runs it, once one formed (root.py); full parameters that `full_params` put on the modules, while
        # nothing else may be done with the unit (full_params.py); the hooks on its modules (hooks.py).
        self.root: AnyRoot | None = None
        self.opened: object | None = None
        self.hooks: object | None = None
        # Copies between shards on the host and the device; None without offload.
        offload = next((part.placing.offload for part in parts), Offload())
        self.host_link = HostLink(device, pin=offload.pin) if offload.to_host else None
        self.channels = UnitChannels(self.groups, device, self.host_link, communication)
        self.gradients = UnitGradients(self.groups, self.record)
        self.seal = Seal(self.groups, self.record, self.channels)
        self.reads = Reads() if self.groups else Reads(left=0)
        # Some parameters may be uninitialised (engine/uninitialized.py); checked in the next forward.
        self.unproven = any(group.has_uninitialized for group in self.groups)
        follow_steps()
        # Modules change only from here on: an error above leaves the model as it was.
        for group in self.groups:
            group.take_back()
        for module in self.modules:
            module.__dict__[_ATTRIBUTE] = self
        note_full(self)

    @property
    def module(self) -> nn.Module:
        """The first of its modules."""
        return self.modules[0]

    @property
    def model(self) -> nn.Module:
        """The module of its root once that formed, else its own."""
        return self.module if self.root is None else self.root.units[0].module

    @property
    def releases(self) -> bool:
        """Whether full parameters have their own memory, which reshard frees."""
        for group in self.groups:
            if not group.shares_memory:
                return True
        return False

    @property
    def full_nbytes(self) -> int | None:
        """Bytes of the unsharded parameters; None with tensor extensions, whose own methods decide."""
        if any(isinstance(group, ExtensionGroup) for group in self.groups):
            return None
        return sum(memory_of(group).full_nbytes for group in self.groups if not group.shares_memory)

    @property
    def is_replicated(self) -> bool:
        """Whether other ranks hold the same shards."""
        return any(links.replicate is not None for links in self.links)

    @property
    def may_read_early(self) -> bool:
        """Whether an unreported backward could read weights while the all-gather writes them in place."""
        return not self.reads.is_on and any(g.placing.world > 1 and g.plan.direct for g in self.groups)

    @property
    def params(self) -> list[ShardedParam]:
        """All parameters of the unit, group by group."""
        return [param for group in self.groups for param in group.params]

    def holds_memory(self) -> bool:
        """Whether full parameters exist, or a backward runs, or gradients wait for a later backward."""
        gradients = self.gradients
        return (
            self.record.full is not Full.SHARDED
            or self.record.in_backward
            or gradients.window_open
            or gradients.partial_open
        )

    # ---- channels ------------------------------------------------------------------------------------------

    def attach(self, root: AnyRoot, pool: BufferPool) -> None:
        """Join `root`, whose buffers the messages use from now on."""
        self.root = root
        self.channels.use(pool)
        self._make_channels()

    def take_grad_dtypes(self) -> None:
        """Follow what users set on `grad_dtype` of sharded parameters before they are first used, as in torch."""
        made = None if self.root is not None else regrouped(self.groups)
        if made is not None:
            self.links = [self.links[position] for position, _ in made]
            # The unit's own list, which others hold.
            self.groups[:] = [group for _, group in made]

    def _make_channels(self) -> None:
        self.channels.make(self.links, self.settings.controls)
        note_full(self)
        self._note_gather_nbytes()
        self.gradients.is_known = False

    def _note_gather_nbytes(self) -> None:
        self.record.plan.gather_nbytes = sum(gather_nbytes(group) for group in self.groups)

    def control(self, controls: Controls) -> None:
        """Reduce, and gather, as `controls` say from now on."""
        if self.root is not None:
            self.root.settings_change(self, controls)
        else:
            self.resolve(controls, Options.current())
        self.settings.controls = controls
        if not self.channels.are_used:
            return
        assert self.root is not None
        if self.record.full is Full.PENDING:
            # The old channels must complete their own gather.
            self.root.wait_unshard(self)
        elif self.record.full is Full.SECONDARY:
            # Kept parts are lost with the old channels.
            self.root.reshard(self)
        self._make_channels()

    def resolve(self, controls: Controls, options: Options) -> None:
        """Choose the strategy. Before the root forms; afterwards it chooses (`Root._locate`)."""
        self.channels.strategy = strategy = controls.strategy(options.communication)
        self.links = [links.under(strategy) for links in self.links]

    def link(self, links: Sequence[Links]) -> None:
        """Communicate over `links` from now on: one per group, with the same ranks."""
        self.links = list(links)
        self.control(self.settings.controls)

    def keep_storage(self, keep: bool) -> None:
        """Keep the bytes of the full parameters between uses, or free them after each."""
        self.settings.keeps_storage = keep
        for group in self.groups:
            group.keep_storage(keep, is_used=self.record.full not in (Full.SHARDED, Full.SECONDARY))
        self._note_gather_nbytes()

    # ---- external changes ----------------------------------------------------------------------------------

    def repair(self) -> None:
        """Make the shards views of the flat buffer again if something replaced them."""
        if self.opened is not None:
            return
        if all(group.look()[0] for group in self.groups):
            return
        self._set_apart()
        for position, group in enumerate(self.groups):
            if group.look()[0]:
                continue
            # Not inference tensors: they must serve later training.
            with torch.inference_mode(False):
                try:
                    group.rebase()
                except DtypeChanged as change:
                    first = group.params[0]
                    if holds_bits(first.sharded):
                        raise RuntimeError(
                            f"{first.name}: expected packed values to stay {group.precision.storage}, the dtype that "
                            f"they were quantised into, found them cast to {change.storage} as if they were numbers; "
                            f"build the model again, and convert its other modules alone"
                        ) from change
                    self.groups[position] = group.converted(group.precision.stored_in(change.storage))
        if self.root is not None:
            self.root.repaired(self)
        self.gradients.forget()
        note_full(self)
        if self.channels.are_used:
            self._make_channels()

    def _set_apart(self) -> None:
        """Make groups of their own for parameters whose local tensors have by now gather methods, as torch does."""
        found = [extended_since(group) for group in self.groups]
        names = ", ".join(param.name for params in found for param in params)
        if not names:
            return
        if self.record.plan.keeps_secondary:
            raise NotImplementedError(
                f"{names}: expected plain local tensors with an integer reshard_after_forward, found "
                f"fsdp_pre_all_gather on them; use True or False"
            )
        if self.root is not None:
            raise RuntimeError(
                f"{names}: expected fsdp_pre_all_gather to be set on a local tensor before the first forward or "
                f"unshard(), when ranks agree on their messages, found it set afterwards; set it right after "
                f"fully_shard, or delete it"
            )
        made = [
            set_apart(group, params, self.settings.policy) for group, params in zip(self.groups, found, strict=True)
        ]
        self.links = [links for links, groups in zip(self.links, made, strict=True) for _ in groups]
        # The unit's own list, which others hold.
        self.groups[:] = [group for groups in made for group in groups]
        if self.settings.keeps_storage:
            self.keep_storage(True)


# ---- ownership -------------------------------------------------------------------------------------------------------
# Which unit has a parameter, its modules and its memory, so that a later `fully_shard` finds what an earlier one took.
# Ties across units are found by it, and two parameters over the same memory.

# On modules: the unit that has their parameters. On parameters as they were before: names of the unit and of itself.
_AROUND = "_fullshard_around"
_OWNER = "_fullshard_owner"


def note_managed(unit: Unit, managed: Iterable[nn.Module]) -> None:
    """Record `unit` on the modules that it manages."""
    for module in managed:
        module.__dict__[_AROUND] = unit


def note_owner(found: Iterable[Found], unit_name: str) -> None:
    """Record the name of their unit on the parameters as they were before."""
    for item in found:
        setattr(item.parameter, _OWNER, (unit_name, item.name))


def refuse_owned(item: Found, module_name: str, roots: Sequence[nn.Module]) -> None:
    """Raise if an earlier call took the parameter of `item`, or those of a module that it is on. `module_name` names
    `roots`, which the present call shards."""
    parameter, name = item.parameter, item.name
    for slot in item.slots:
        around = slot.module.__dict__.get(_AROUND)
        if around is not None and any(slot in param.slots for param in around.params):
            raise RuntimeError(
                f"{name}: expected inner modules to be sharded before those around them, found {module_name} after "
                f"{around.record.name}, which has its parameters already; call fully_shard bottom-up: on each "
                f"block first, on the whole model last"
            )
    owner = getattr(parameter, _OWNER, None)
    if owner is not None:
        here = name.rpartition(".")[0]
        there = _path_of_owner(owner, roots)
        raise ValueError(
            f"{name}: expected each parameter in one unit, found it tied to "
            f"{f'{there}.{owner[1]} (of the unit {there}: {owner[0]})' if there else f'{owner[1]} of {owner[0]}'}, "
            f"which was sharded before this {module_name}; make one unit of both places, "
            f"fully_shard([{there or owner[0]}, {here or module_name}]), or leave both to the module around them"
        )


def _path_of_owner(owner: tuple[str, str], roots: Sequence[nn.Module]) -> str:
    """The dotted name, below `roots`, of the unit that has a tied parameter; "" if it is not below them."""
    for root in roots:
        for path, module in root.named_modules():
            unit = unit_of(module)
            if unit is not None and unit.record.name == owner[0] and any(p.name == owner[1] for p in unit.params):
                return clean_name(path)
    return ""


# Parameters that are different objects over the same memory: tied in the plain model, two parameters once they are cut.

_MEMORY = "_fullshard_memory"


class Span(NamedTuple):
    """The bytes [start, end) of a parameter before it is cut. `memory` stands for its storage, whose address another
    one may have later."""

    memory: object
    start: int
    end: int
    name: str
    trains: bool


_spans: weakref.WeakKeyDictionary[Unit, list[Span]] = weakref.WeakKeyDictionary()


def check_memory(found: Iterable[Found], roots: Sequence[nn.Module]) -> list[Span]:
    """The memory of `found`, for `note_memory`. Raises `ValueError` if two parameters of them and of the units below
    `roots` overlap and one of them trains."""
    spans = list(filter(None, map(_span, found)))
    units = {unit for root in roots for module in root.modules() if (unit := unit_of(module)) is not None}
    known = [
        span._replace(name=f"{span.name} (of the unit {unit.record.name})")
        for unit in units
        for span in _spans.get(unit, ())
    ]
    last: Span | None = None
    for span in sorted([*spans, *known], key=lambda span: (id(span.memory), span.start)):
        if last is None or span.memory is not last.memory or span.start >= last.end:
            last = span
        elif span.trains or last.trains:
            raise ValueError(
                f"{last.name} and {span.name}: expected each parameter in memory of its own, found two parameters over "
                f"the same memory, which train as one and apart once they are cut; make them one object, as "
                f"`a.weight = b.weight` does, or give one a copy: nn.Parameter(p.detach().clone())"
            )
        elif span.end > last.end:
            last = span
    return spans


def note_memory(unit: Unit, spans: list[Span]) -> None:
    """Remember the memory that the parameters of `unit` had."""
    _spans[unit] = spans


def _span(item: Found) -> Span | None:
    local = local_data(item.parameter)
    if type(local) not in (torch.Tensor, nn.Parameter) or local.layout is not torch.strided or not local.numel():
        return None
    storage = local.untyped_storage()
    start = int(local.storage_offset()) * local.itemsize
    memory = storage.__dict__.setdefault(_MEMORY, object())
    return Span(memory, start, start + int(local.nbytes), item.name, item.parameter.requires_grad)
