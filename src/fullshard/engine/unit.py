"""One `fully_shard` call at run time: its modules, its parameter groups, its record, and how they talk."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from .._torch import local_of
from .._torch.modules import call, outside_graphs
from ..comm import BufferPool, GatherChannel, HostLink, Links, ReduceChannel
from ..layout import UnitMemory
from ..param import DtypeChanged, ExtensionGroup, Found, ParamGroup, Placing, ShardedParam, has_extension, note_initial
from ..policy import Controls, Offload, Precision, resolve_precision
from ..policy.policies import MixedPrecisionLike
from ..schedule import Full, UnitRecord
from .channels import Channels, Narrowing
from .misuse import note_full
from .optimizer_steps import follow_steps, optimizer_steps

if TYPE_CHECKING:
    from .executor import Shared
    from .full_params import OpenUnit
    from .hooks import UnitHooks
    from .root import Root
    from .stepping import Stepper


# ---- sizes -----------------------------------------------------------------------------------------------------------
# Bytes of one parameter group, as its layout has them; the same on every rank.


def memory_of(group: ParamGroup) -> UnitMemory:
    """As far as gathers are concerned."""
    storage, compute, wire = (group.precision.storage, group.precision.compute, group.precision.wire)
    return UnitMemory("", group.pack, group.plan, storage.itemsize, compute.itemsize, wire.itemsize)


def gather_nbytes(group: ParamGroup) -> int:
    """What its gather takes, in bytes."""
    if group.shares_memory:
        return 0
    memory = memory_of(group)
    # Shards on the host are copied to the device first.
    return memory.gather_nbytes + (memory.shard_nbytes if group.placing.offload.to_host else 0)


# ---- bits ------------------------------------------------------------------------------------------------------------
# The bits of a tensor as one number: a change of any one of its elements changes it.

SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def sum_of_bits(tensor: Tensor) -> int:
    """The sum of the elements of this rank's part, their bits taken as integers, modulo 2**64; waits for a device."""
    plain = local_of(tensor) if isinstance(tensor, DTensor) else tensor.detach()
    if plain.is_meta or not plain.numel():
        return 0
    return int(plain.reshape(-1).view(SAME_SIZE.get(plain.element_size(), torch.int64)).sum(dtype=torch.int64))


# ---- samples ---------------------------------------------------------------------------------------------------------
# Shards that changed without a sign while full parameters were kept.
#
# Full parameters that stay after an evaluation are used again unless shards were written since, which versions and
# optimizer steps tell (unit.py). A write through `.data`, and torch's list operations on DTensors, leave no such sign.
# So a few thousand elements of the shards are added up when they are gathered, and again before what was gathered is
# used once more. It is no reason to gather anew: a rank whose rows did not change would not. It is an error.
#
# On a CPU alone: on another device it would wait for what is under way. What changes few elements may be missed.

_ELEMENTS = 4096


def sample_of(unit: Unit) -> tuple[int, ...] | None:
    """What to compare later; None where full parameters are not kept for later forwards."""
    record = unit.record
    keeps = record.keeps_in_evaluation and not record.reshard_after_forward
    return _sums(unit) if keeps or record.narrows or not record.reshard_after_backward else None


def _sums(unit: Unit) -> tuple[int, ...]:
    """Over elements of the shards, by group."""
    found = []
    for group in unit.groups:
        flat = group.flat
        if group.shares_memory or flat.device.type != "cpu":
            continue
        step = max(1, flat.numel() // _ELEMENTS)
        found.append(sum_of_bits(flat[::step]))
    return tuple(found)


def refuse_unseen_writes(unit: Unit) -> None:
    """Raise `RuntimeError` when the shards are not those of which the full parameters were made, though nothing says
    so."""
    for group in unit.groups:
        group.refuse_assigned_data()
    if unit.gathered_sample is not None and unit.gathered_sample != _sums(unit):
        raise RuntimeError(
            f"{unit.record.name}: expected that its sharded parameters are what they were when they were gathered, "
            f"found other values and no sign of a write: full parameters are kept after a forward here "
            f"(reshard_after_forward=False or a number), and a write through .data or by torch._foreach is not seen. "
            f"Write with p.copy_() and the like, without gradients, or call reshard() of each sharded module afterwards"
        )


# ---- gradient hooks --------------------------------------------------------------------------------------------------
# A gradient of a full parameter came: who is called, and who is not kept for it.
#
# Python's collector does not see that a tensor keeps its hooks. One that kept what keeps the tensor would keep both for
# ever, and the model with them.


def hook_gradient(unit: Unit, param: ShardedParam, bit: int) -> RemovableHandle:
    """Call `unit.on_gradient` each time a backward brought the gradient of `param`, the one of `bit`, to its full
    parameter. Keeps neither of them."""
    its_unit, itself, name = weakref.ref(unit), weakref.ref(param), param.name

    def arrived(_full: Tensor) -> None:
        here, reached = its_unit(), itself()
        if here is None or reached is None or here.on_gradient is None:
            raise RuntimeError(
                f"{name}: expected the module that computed this to exist when a backward goes through it, found that "
                f"it is gone; keep the model until its backwards are over"
            )
        here.on_gradient(here, reached, bit)

    handle: RemovableHandle = param.full.register_post_accumulate_grad_hook(outside_graphs(arrived))
    return handle


# ---- unit ------------------------------------------------------------------------------------------------------------

_ATTRIBUTE = "_fullshard_unit"
# Sets of trainable parameters for which the way of their gradients is kept: a program may choose others in each step.
_REDUCE_CHANNELS = 8
# Forwards with gradients during which saved weights are watched (engine/saved_tensors.py).
WATCHED_FORWARDS = 2


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that `module` is the module of, or one of several, or None."""
    return cast("Unit | None", module.__dict__.get(_ATTRIBUTE))


class Part(NamedTuple):
    """Parameters of a unit that share a mesh. They become one group for each of their dtypes."""

    found: Sequence[Found]
    placing: Placing
    links: Links


class Unit:
    """`modules`: usually one; those of `fully_shard([a, b])` share everything, and each of them may run by itself.
    `reshard_after_forward` is what the user said: None means yes unless the unit turns out to be the root. With
    `note_values`, those of the full parameters are noted, to be compared with other ranks'."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        parts: Sequence[Part],
        *,
        device: torch.device,
        policy: MixedPrecisionLike,
        reshard_after_forward: bool | None,
        note_values: bool = False,
    ) -> None:
        self.modules = tuple(modules)
        self.module = self.modules[0]
        # Those that did not run in the open pass.
        self._modules_left: set[nn.Module] = set()
        self.hooks: UnitHooks | None = None
        # Runs what users call on the module, which they may do in compiled code.
        self.outside = outside_graphs(call)
        # Where it computes.
        self.device = device
        self.policy = policy
        self.reshard_after_forward = reshard_after_forward
        name = "+".join(type(module).__name__ for module in self.modules)
        self.record = UnitRecord(name, 0, reshard_after_forward=reshard_after_forward is not False)
        self.groups: list[ParamGroup] = []
        # By group: with whom it is exchanged.
        self.links: list[Links] = []
        # What the user set about reductions, and whether they go on to the ranks that replicate.
        self.controls = Controls()
        # Names of the parameters below the module that the user said to leave alone.
        self.ignored_names: tuple[str, ...] = ()
        self.all_reduces = True
        for part in parts:
            for same in _by_dtype(part.found):
                precision = resolve_precision(policy, same[0].parameter.dtype)
                group = _group(same, precision, part.placing, policy)
                self.groups.append(group)
                self.links.append(part.links)
                if note_values and part.placing.mesh.size() > 1 and not isinstance(group, ExtensionGroup):
                    note_initial(group.params, same)
        self.record.empty = not self.groups
        self.notes_values = note_values
        # Between shards on the host and compute on the device; None where both are in one place.
        offload = next((part.placing.offload for part in parts), Offload())
        self.host_link = HostLink(device, pin=offload.pin) if offload.to_host else None
        self.record.narrows = any(links.block is not None for links in self.links)
        self.root: Root | None = None
        follow_steps()
        # Full parameters that `full_params` put on the modules: nothing else may be done with the unit meanwhile.
        self.opened: OpenUnit | None = None
        self.gathers: list[GatherChannel] = []
        # What is kept between forward and backward, and how it is gathered from that.
        self.narrowing = Narrowing()
        # Those of the gather that is under way, or was the last.
        self.arriving: list[GatherChannel] = []
        self._reduces: list[dict[tuple[int, ...], ReduceChannel]] = []
        self._pool: BufferPool | None = None
        self._communication = "auto"
        # How often: what was derived from them holds as long as this does.
        self.channels_made = 0
        # ---- gradients of the running backward: one bit per trainable parameter
        self.arrived = 0
        self.expected = 0
        # Of these, by what has arrived: bytes of the largest gradient that has not.
        self._largest_missing: dict[int, int] = {}
        # Those that one run of the autograd engine brought (its number, bits): each brings a parameter's once.
        self.came = (-1, 0)
        self.on_gradient: Callable[[Unit, ShardedParam, int], None] | None = None
        self.on_repaired: Callable[[Unit], None] | None = None
        self._gradient_hooks: list[RemovableHandle] = []
        self._knows_trainable = False
        # What the user announced; counts when this unit is the root.
        self.is_last_backward = True
        # Likewise: with whom its root shares buffers, and what its next forward waits for.
        self.shared: Shared | None = None
        self.post_optim_event: torch.Event | None = None
        # Likewise: bytes of gathers that may be ahead, and of gradients and their messages; None: as by default.
        self.prefetch_nbytes: int | None = None
        self.gradient_nbytes: int | None = None
        # Takes its gradients in backward.
        self.stepper: Stepper | None = None
        # A backward ended with unreduced gradients, on every rank alike: the next message is in the reduce dtype.
        self.window_open = False
        # Likewise with partial sums, which the next message that is all-reduced carries.
        self.partial_open = False
        # ---- staleness of kept full parameters, and watching
        self.gathered_versions: tuple[tuple[int, ...], ...] = ()
        self.gathered_sample: tuple[int, ...] | None = None
        self.watched = WATCHED_FORWARDS
        self.irregular = False
        # The saved weights of the last forward with gradients were watched.
        self.is_watched = False
        # Some of it may never have been written (engine/uninitialized.py); looked at in the next forward.
        self.unproven = any(group.has_uninitialized for group in self.groups)
        # Nothing above changes a module: what is refused there leaves the model as it was.
        for group in self.groups:
            group.take_back()
        for module in self.modules:
            module.__dict__[_ATTRIBUTE] = self
        note_full(self)

    @property
    def releases(self) -> bool:
        """Whether full parameters have memory of their own, which comes and goes."""
        for group in self.groups:
            if not group.shares_memory:
                return True
        return False

    @property
    def full_nbytes(self) -> int | None:
        """Bytes of the full parameters while they are there; None where a tensor's own methods decide (extensions)."""
        if any(isinstance(group, ExtensionGroup) for group in self.groups):
            return None
        return sum(memory_of(group).full_nbytes for group in self.groups if not group.shares_memory)

    @property
    def is_replicated(self) -> bool:
        """Whether other ranks hold the same shards."""
        return any(links.replicate is not None for links in self.links)

    @property
    def may_read_early(self) -> bool:
        """Whether a backward that nothing announced could read weights while they arrive in their final memory."""
        return not self.is_watched and any(g.placing.world > 1 and g.plan.direct for g in self.groups)

    @property
    def params(self) -> list[ShardedParam]:
        """All parameters of the unit, group by group."""
        return [param for group in self.groups for param in group.params]

    def ran(self, module: nn.Module) -> bool:
        """Note that `module` ran; whether others of the unit did not, in this pass over all of them."""
        if len(self.modules) == 1:
            return False
        if not self.record.pass_open:
            self._modules_left = set(self.modules)
        self._modules_left.discard(module)
        return bool(self._modules_left)

    # ---- channels ------------------------------------------------------------------------------------------

    def attach(self, root: Root, pool: BufferPool, communication: str) -> None:
        """Belong to `root`, whose buffers the messages use from now on."""
        self.root = root
        self._pool = pool
        self._communication = communication
        self._make_channels()

    def _make_channels(self) -> None:
        channels = self._channels()
        with torch.inference_mode(False):
            self.gathers = [
                channels.gather(*group_and_links) for group_and_links in zip(self.groups, self.links, strict=True)
            ]
            self.narrowing = Narrowing(self.groups, self.links, self.gathers, channels)
        note_full(self)
        self.channels_made += 1
        self.arriving = self.gathers
        self.record.gather_nbytes = sum(gather_nbytes(group) for group in self.groups)
        self._reduces = [{} for _ in self.groups]
        self._knows_trainable = False

    def control(self, controls: Controls) -> None:
        """Reduce, and gather, as `controls` say from now on."""
        if self.root is not None:
            self.root.settle_links(self, controls)
            self.root.facts.settings_changed()
        self.controls = controls
        self._remake_channels()

    def link(self, links: Sequence[Links]) -> None:
        """Exchange the groups over `links`, one for each group, from now on: the same ranks."""
        self.links = list(links)
        self.control(self.controls)

    def _remake_channels(self) -> None:
        if self._pool is None:
            return
        if self.record.full is Full.PENDING:
            # What the old channels have under way arrives through them.
            assert self.root is not None
            self.root.wait_unshard(self)
        elif self.record.full is Full.NARROWED:
            # What was kept goes with the old channels.
            assert self.root is not None
            self.root.reshard(self)
        self._make_channels()

    def reduce_channel(self, position: int) -> ReduceChannel:
        """The channel for the trainable parameters of group `position`, as they are now."""
        group = self.groups[position]
        known = self._reduces[position]
        channel = known.get(group.trainable)
        if channel is None:
            if len(known) >= _REDUCE_CHANNELS:
                del known[next(iter(known))]
            channel = known[group.trainable] = self._channels().reduce(group, self.links[position])
        return channel

    def _channels(self) -> Channels:
        assert self._pool is not None
        return Channels(self._pool, self._communication, self.controls, self.device, self.host_link)

    # ---- what changes under us -----------------------------------------------------------------------------

    def repair(self) -> None:
        """Make the shards views of a flat buffer again where something replaced them."""
        if self.opened is not None:
            return
        # In an evaluation too, what is made here has to serve training.
        with torch.inference_mode(False):
            broken = self._repair_groups()
        if broken:
            if self.on_repaired is not None:
                self.on_repaired(self)
            self._drop_gradient_hooks()
            note_full(self)
            if self._pool is not None:
                self._make_channels()

    def _repair_groups(self) -> bool:
        broken = False
        for position, group in enumerate(self.groups):
            group.refuse_assigned_data()
            if group.is_aliased():
                continue
            broken = True
            try:
                group.rebase()
            except DtypeChanged as change:
                self.groups[position] = group.converted(resolve_precision(self.policy, change.storage))
        return broken

    def note_versions(self) -> None:
        """Remember of which shards the full parameters are made."""
        self.gathered_versions = self.versions()
        self.gathered_sample = sample_of(self)

    def is_stale(self) -> bool:
        """Whether shards were written, or replaced, since the full parameters were gathered. Raises `RuntimeError` when
        they were written in a way that leaves no sign."""
        if self.gathered_versions != self.versions():
            return True
        refuse_unseen_writes(self)
        full = self.record.full
        if full is Full.NARROWED or (full is Full.PENDING and self.arriving is self.narrowing.widens):
            return not self.narrowing.is_aliased()
        showing_full = full is Full.FULL
        return not all(group.is_aliased(showing_full=showing_full) for group in self.groups)

    def versions(self) -> tuple[tuple[int, ...], ...]:
        assert self.root is not None
        steps, versions = -1, []
        for group in self.groups:
            versions.append(group.versions())
            if steps == -1 and group.may_be_stepped:
                steps = optimizer_steps(self.root.thread)
        return ((steps,), *versions)

    # ---- which parameters get gradients --------------------------------------------------------------------

    def show_full(self) -> None:
        """Put the full parameters on the modules, with the requires_grad the user gave the sharded ones."""
        changed = not self._knows_trainable
        for group in self.groups:
            changed |= group.show_full()
        if changed:
            self._learn_trainable()
            if self.on_repaired is not None:
                self.on_repaired(self)

    def show_shards(self) -> None:
        for group in self.groups:
            group.show_shards()
        self.narrowing.show_shards()

    def _learn_trainable(self) -> None:
        self._drop_gradient_hooks()
        bit, frozen = 0, False
        for group in self.groups:
            group.trainable = tuple(i for i, p in enumerate(group.params) if p.full.requires_grad)
            frozen = frozen or len(group.trainable) < len(group.params)
            for i in group.trainable:
                self._gradient_hooks.append(hook_gradient(self, group.params[i], 1 << bit))
                bit += 1
        self.expected = (1 << bit) - 1
        self._largest_missing.clear()
        self.record.frees_late = frozen
        self.record.trainable = bit > 0
        self._knows_trainable = True

    def largest_missing_nbytes(self) -> int:
        """Bytes of the largest gradient that the running backward may still bring."""
        known = self._largest_missing.get(self.arrived)
        if known is None:
            trained = [group.params[i].full for group in self.groups for i in group.trainable]
            missing = [full.nbytes for bit, full in enumerate(trained) if not self.arrived >> bit & 1]
            known = self._largest_missing[self.arrived] = max(missing, default=0)
        return known

    def take_assigned(self) -> None:
        """Take the gradients that somebody put on full parameters by hand, of which no hook tells."""
        for group in self.groups if self._knows_trainable else ():
            for param in (group.params[i] for i in group.trainable):
                if param.full.grad is not None:
                    param.take_fresh()
                    self.arrived |= 1

    def holds_gradients(self) -> bool:
        """Whether earlier backwards left gradients that were not reduced."""
        return any(param.live_held() is not None for param in self.params)

    def _drop_gradient_hooks(self) -> None:
        for handle in self._gradient_hooks:
            handle.remove()
        self._gradient_hooks.clear()
        self._knows_trainable = False


def _by_dtype(found: Sequence[Found]) -> list[list[Found]]:
    """Parameters that travel together: of one dtype, and each by itself that says how it is gathered."""
    groups: dict[object, list[Found]] = {}
    for item in found:
        alone = has_extension(item.parameter, item.name)
        groups.setdefault(id(item) if alone else item.parameter.dtype, []).append(item)
    return list(groups.values())


def _group(found: Sequence[Found], precision: Precision, placing: Placing, policy: MixedPrecisionLike) -> ParamGroup:
    if has_extension(found[0].parameter, found[0].name):
        return ExtensionGroup(found, precision, placing, policy)
    return ParamGroup(found, precision, placing)
