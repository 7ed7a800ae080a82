"""`FSDPModule`: what a sharded module can do. Every method is ours; torch's class is a base for `isinstance` alone."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable
from typing import Any, Literal, NoReturn, cast

import torch
from torch import nn

from .._torch_compat import TorchFSDPModule, TorchUnshardHandle
from ..runtime import Unit, unit_of
from ..runtime.forming import early_root_of, module_units
from ..runtime.opened import refuse_opened
from ..runtime.replaced import noting_emptied
from ..runtime.shared import Shared
from ..runtime.uninitialized import Conversion, note_uninitialized
from ..runtime.unit import WATCHED_FORWARDS
from . import memory, reductions, validate
from .methods import named_methods
from .save_pretrained import checked_save
from .torch_state import StateView, torch_state_of

# The sharded class of each class it was made for: one per class, so that types compare equal and pickle names agree.
# As long as a module of it exists: classes are defined in functions, too.
_SHARDED_CLASSES: weakref.WeakValueDictionary[type[nn.Module], type[nn.Module]] = weakref.WeakValueDictionary()


class UnshardHandle(TorchUnshardHandle):
    """What `unshard(async_op=True)` returns: the parameters are usable after `wait()`."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """Put the full parameters on the module. Later calls do nothing."""
        unit, self._unit = self._unit, None
        if unit is not None:
            unit.outside(_wait_unshard, unit)


class FSDPModule(TorchFSDPModule):
    """A module to which `fully_shard` was applied: base class beside the module's own class.

    The setters act on this module, or with `recurse=True` also on all sharded modules below it. What this version does
    not have yet raises `NotImplementedError`.
    """

    # Position of the module's own class in the method resolution order of FSDP<Class>: where torch has it, because
    # dynamo and others read that position without asking.
    _orig_cls_mro_index = 2

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # `type(module)(...)`, as slicing a container does, makes an unsharded module of the original class.
        original = cls.__mro__[cls._orig_cls_mro_index]
        made = original.__new__(original, *args, **kwargs)
        made.__init__(*args, **kwargs)
        return made

    # ---- full parameters -----------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's parameters (not those of units below) and put them on the module.

        async_op: return at once with a handle; the parameters are full after `handle.wait()` or in the next forward.
        They stay full until `reshard()` or the end of the next forward or backward that frees them.
        """
        unit = self._unit()
        unit.outside(_unshard, unit, not async_op)
        return UnshardHandle(unit) if async_op else None

    def reshard(self) -> None:
        """Free this module's full parameters and put the sharded ones on the module."""
        unit = self._unit()
        unit.outside(_reshard, unit)

    # ---- when to communicate -------------------------------------------------------------------------------

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """False: the following backwards keep whole gradients on each rank instead of reducing them.

        The first backward with True reduces what they brought together with its own (seed 001: `no_sync`). Held
        gradients take the bytes of the unsharded model in the reduce dtype. While they are held, `.grad` is a marker
        that `zero_grad()` clears and everything else refuses.
        """
        for unit in self._units(recurse):
            unit.record.sync = requires_gradient_sync

    # How many bytes something may take.
    set_prefetch_bytes = memory.set_prefetch_bytes
    set_gradient_bytes = memory.set_gradient_bytes
    set_resident_bytes = memory.set_resident_bytes

    # How gradients are reduced.
    set_requires_all_reduce = reductions.set_requires_all_reduce
    set_gradient_divide_factor = reductions.set_gradient_divide_factor
    set_reduce_scatter_divide_factor = reductions.set_reduce_scatter_divide_factor
    set_force_sum_reduction_for_comms = reductions.set_force_sum_reduction_for_comms
    set_all_reduce_hook = reductions.set_all_reduce_hook
    set_custom_all_gather = reductions.set_custom_all_gather
    set_custom_reduce_scatter = reductions.set_custom_reduce_scatter
    set_allocate_memory_from_process_group_for_comm = reductions.set_allocate_memory_from_process_group_for_comm
    set_communication = reductions.set_communication
    set_reduce_scatter_unused_params = reductions.set_reduce_scatter_unused_params
    set_reduce_scatter_max_input_buffers = reductions.set_reduce_scatter_max_input_buffers
    set_separate_reduce_scatter_group = reductions.set_separate_reduce_scatter_group

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """False: more backwards through the forwards already run will follow; keep what they need of the order."""
        unit = self._unit()
        unit.is_last_backward = is_last_backward
        if unit.root is not None:
            unit.root.run.is_last_backward = is_last_backward

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether to free full parameters after forward, from the next forward on; in the place of an integer too."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"reshard_after_forward: expected a bool, found {reshard_after_forward!r}; "
                f"degrees are given to fully_shard"
            )
        for unit in self._units(recurse):
            unit.reshard_after_forward = reshard_after_forward
            unit.record.reshard_after_forward = reshard_after_forward
            unit.record.narrows = False

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether to free full parameters after backward. When kept, they are gathered again once shards change."""
        for unit in self._units(recurse):
            unit.record.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: list[Any]) -> None:
        """Gather the parameters of `modules` when this module's forward begins, instead of the recorded order."""
        units = validate.check_sharded(modules, "set_modules_to_forward_prefetch", unit_of)
        self._unit().record.forward_prefetch = tuple(unit.record for unit in units)

    def set_modules_to_backward_prefetch(self, modules: list[Any]) -> None:
        """Gather the parameters of `modules` when this module's backward begins, instead of the recorded order."""
        units = validate.check_sharded(modules, "set_modules_to_backward_prefetch", unit_of)
        self._unit().record.backward_prefetch = tuple(unit.record for unit in units)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """False: backward does not gather this module's parameters, because it does not read them (an embedding).

        Only this module's own. Parameters that are full stay so until their gradients are ready. In the next forwards
        saved weights are watched: one that backward reads all the same is gathered then, late but right.
        """
        unit = self._unit()
        unit.record.gathers_in_backward = bool(unshard_in_backward)
        unit.watched = max(unit.watched, WATCHED_FORWARDS)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let the gathers of the next forward of the root, and all that follows, come after `event`, which an optimizer
        that ran on a stream of its own recorded. For one forward. Ours are issued in the order of the compute stream,
        so it can delay them but not let them overtake. On a CPU everything is in order: the event is dropped unused.

        event: a `torch.Event` or one of a device module (`torch.cuda.Event`); None takes back the last one.
        Raises `TypeError` for anything else.
        """
        if event is not None and not (isinstance(event, torch.Event) or callable(getattr(event, "wait", None))):
            raise TypeError(
                f"event: expected a torch.Event, found {type(event).__name__}; pass stream.record_event() of the "
                f"optimizer's stream"
            )
        unit = self._unit()
        first = unit if unit.root is None else unit.root.units[0]
        first.post_optim_event = event

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accepted for torch's call shape. True asks torch for asynchronous gathers on the compute stream without a
        staging stream; gathers here are always that, prefetched or by hand, so neither value changes anything.

        Raises `TypeError` for anything but a bool.
        """
        if not isinstance(async_op, bool):
            raise TypeError(f"async_op: expected a bool, found {async_op!r}; gathers are asynchronous with either")

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Asks for staging buffers in NCCL's symmetric memory.

        Raises `RuntimeError` for another backend than "NCCL" or process groups of another one, and otherwise
        `NotImplementedError`: it could not be tried on a device that has it.
        """
        backends = sorted({group.placing.backend for group in self._unit().groups})
        if backend != "NCCL" or backends != ["nccl"]:
            raise RuntimeError(
                f"backend: expected 'NCCL' and parameters exchanged by it, found {backend!r} and parameters exchanged "
                f"by {', '.join(backends) or 'nobody'}; leave the call out: nothing else has symmetric memory"
            )
        raise validate.not_built(
            "set_symm_mem_for_comm", backend, "use set_allocate_memory_from_process_group_for_comm(True)"
        )

    def reset_iter_state(self) -> None:
        """Discard what a failed step left. Never needed: the next forward does it. Harmless (root only, as torch)."""
        unit = self._unit()
        if unit.root is None:
            return
        if unit.root.units[0] is not unit:
            raise RuntimeError(
                f"reset_iter_state: expected the root module, found {unit.record.name} below it; call it on the root"
            )
        unit.root.abandon()

    # ---- what surrounds a module ---------------------------------------------------------------------------

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """`to`, `to_empty`, `float`, ...: on sharded parameters, which afterwards are views of one buffer again.

        What `to_empty` makes is watched until it was written; buffers that have data keep it (docs/initialisation.md).
        """
        refuse_opened(self._unit(), "a conversion of the module")
        self.reshard()
        conversion = Conversion.of(fn)
        emptied = conversion.emptied
        unit = self._unit()
        with noting_emptied(unit, cast(nn.Module, self), recurse=recurse):
            result = super()._apply(conversion, recurse)  # that of the module's class: torch's is behind nn.Module
        unit.repair()
        if conversion.emptied != emptied:
            note_uninitialized(unit)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `nn.Module.zero_grad`, of the sharded parameters whatever stands on the modules: the root's are full
        between forward and backward, where many loops call this."""
        super().zero_grad(set_to_none)  # type: ignore[misc]  # that of the module's class
        for unit in self._units(recurse=True):
            for param in unit.params:
                gradient = param.sharded.grad
                if gradient is not None and not set_to_none:
                    gradient.detach_().zero_()
                elif gradient is not None:
                    param.sharded.grad = None

    def _get_fsdp_state(self) -> StateView:  # type: ignore[override]
        """The state in the shape in which torch's own code reads it."""
        self._unit()
        state = torch_state_of(cast(nn.Module, self))
        assert state is not None
        return state

    def _unit(self) -> Unit:
        unit = unit_of(cast(nn.Module, self))
        if unit is None:
            raise RuntimeError(
                f"expected a module that fully_shard was applied to, found an unsharded {type(self).__name__}; "
                f"apply fully_shard to it"
            )
        return unit

    def _units(self, recurse: bool) -> list[Unit]:
        return module_units(cast(nn.Module, self)) if recurse else [self._unit()]

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise AssertionError(
            f"FSDP does not support deepcopy: expected a module that is not sharded, found {type(self).__name__}, "
            f"which holds process groups and one flat buffer; build the model again, shard it and load the state dict"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise pickle.PicklingError(
            f"pickle: expected a module that is not sharded, found {type(self).__name__}, which holds process groups "
            f"and one flat buffer; save its state_dict()"
        )


def _unshard(unit: Unit, wait: bool) -> None:
    refuse_opened(unit, "unshard")
    early_root_of(unit).unshard(unit)
    if wait:
        _wait_unshard(unit)


def _wait_unshard(unit: Unit) -> None:
    early_root_of(unit).wait_unshard(unit)


def _reshard(unit: Unit) -> None:
    refuse_opened(unit, "reshard")
    if unit.root is not None:
        unit.root.reshard(unit)


def sharded_class(original: type[nn.Module]) -> type[nn.Module]:
    """FSDP<Original>: a subclass of `FSDPModule` and `original`, made once per class."""
    made = _SHARDED_CLASSES.get(original)
    if made is None:
        # nn.Module is named so that torch's class, there for `isinstance` alone, comes behind it: neither it nor its
        # methods then stand between the module's class and what that class inherits.
        bases: tuple[type, ...] = (FSDPModule, original, nn.Module, TorchFSDPModule)
        bases = tuple(dict.fromkeys(bases))
        members = {"__module__": original.__module__, **named_methods(original, FSDPModule), **checked_save(original)}
        made = type(f"FSDP{original.__name__}", bases, members)
        _SHARDED_CLASSES[original] = made
    return made


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Let models that run side by side, such as the chunks of a pipeline stage, share what communication needs.

    modules: roots; from now on they use the buffers of the first one's messages, and `FULLSHARD_REDUCTIONS` bounds the
        reductions of all together. Call it before the first forward, or between steps. Empty: nothing.
    Raises `ValueError` for what is not sharded and for another device, `RuntimeError` while messages are under way.
    """
    units = validate.check_sharded(modules, "modules", unit_of)
    devices = sorted({str(unit.device) for unit in units})
    if len(devices) > 1:
        raise ValueError(f"modules: expected one device, found {', '.join(devices)}; share among those of one device")
    if not units:
        return
    first = units[0]
    root = first.root
    shared = root.shared if root is not None else first.shared or Shared(keep=first.device.type == "cpu")
    for unit in units:
        if unit.root is not None:
            unit.root.share(shared)
        unit.shared = shared
