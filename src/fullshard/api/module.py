"""`FSDPModule`: the methods of a sharded module. torch's class is a base for `isinstance` only."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

import torch
from torch import nn

from .._torch import TorchFSDPModule, TorchUnshardHandle, mark_managed, publish_state
from ..engine import Unit, unit_of
from ..engine.full_params import refuse_opened
from ..engine.hooks import hooks_of
from ..engine.root import early_root_of, formed
from ..engine.stages import note_stage
from ..engine.state_dict import noting_emptied, standing_parameter
from ..engine.uninitialized import Conversion, note_uninitialized
from ..engine.unit import HOOKED_FORWARDS, Shared, module_units
from ..param import ShardedParam, Slot
from ..policy.arguments import expect_flag
from . import finalization, settings, validate
from .materialize import filling

# ---- torch state -----------------------------------------------------------------------------------------------------
# The state of a sharded module in the form that torch's own code reads.
#
#     who                     reads
#     pipelining.stage        fully_shard.state(m)._state_ctx.all_states[*]._fsdp_param_groups[*].post_backward(), then
#                             ._root_post_backward_final_callback(), after micro-batches without synchronisation
#     dynamo, transformers    m._is_fsdp_managed_module, m._fsdp_use_orig_params of every module of a unit
#     replicate, DDP          the registry of composable APIs
#
# fullshard itself never reads these objects: they are views of a `Unit` and hold no state.

_OF_UNIT = "_fullshard_torch_state"


class GroupView:
    """Stands for a param group of torch; fullshard's have no post-backward of their own."""

    def post_backward(self, *_: object) -> None:
        """Does nothing: the callback that follows reduces the held gradients of all units, in the scheduled order."""


class StateView:
    """Stands for torch's module state; the modules of `unit` share one."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._fsdp_param_groups = [GroupView() for _ in unit.groups]
        self._modules = unit.modules

    @property
    def _fsdp_param_group(self) -> GroupView | None:
        return self._fsdp_param_groups[0] if self._fsdp_param_groups else None

    @property
    def _is_root(self) -> bool | None:
        root = formed(self._unit)
        return None if root is None or root.provisional else root.units[0] is self._unit

    @property
    def _comm_ctx(self) -> object:
        """An object that models have in common after `share_comm_ctx`."""
        root = formed(self._unit)
        return self._unit.settings.shared or (self if root is None else root.shared)

    @property
    def _state_ctx(self) -> ContextView:
        return ContextView(self._unit)

    def _root_post_backward_final_callback(self) -> None:
        """Reduce the gradients that no_sync backwards accumulated, for units that synchronise again."""
        note_stage(self._unit.module, reduces=True)
        root = formed(self._unit)
        if root is not None:
            root.reduce_held()


class ContextView:
    """Stands for the context that torch's states below one root share."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    @property
    def all_states(self) -> list[StateView]:
        root = formed(self._unit)
        units = [self._unit] if root is None else root.units
        return [state for unit in units if (state := torch_state_of(unit.module)) is not None]

    @property
    def is_last_backward(self) -> bool:
        root = formed(self._unit)
        return self._unit.settings.is_last_backward if root is None else root.run.ending.is_last


def torch_state_of(module: nn.Module) -> StateView | None:
    """The state of `module`, or None if it is not sharded."""
    state = module.__dict__.get(_OF_UNIT)
    assert state is None or isinstance(state, StateView)
    return state


def publish(unit: Unit, managed: Iterable[nn.Module]) -> None:
    """Put the state of `unit` where torch's code reads it; `managed`: every module whose parameters may be in it."""
    state = StateView(unit)
    for module in unit.modules:
        module.__dict__[_OF_UNIT] = state
        publish_state(module, state)
    for module in managed:
        mark_managed(module)


# ---- module ----------------------------------------------------------------------------------------------------------

# The module of torch that finds names of an optimizer's parameters by `model.named_parameters()`. torch's FSDP2 answers
# it only after `model.state_dict()`, which reshards there; here a state dict changes nothing.
_LOOKS_UP = "torch.distributed.checkpoint.state_dict"


def _is_looked_up() -> bool:
    """Whether the caller's caller is that module."""
    frame = inspect.currentframe()
    try:
        for _ in range(2):
            frame = None if frame is None else frame.f_back
        return frame is not None and frame.f_globals.get("__name__") == _LOOKS_UP
    finally:
        del frame  # it may hold itself, and what all callers hold


def _slots(module: nn.Module) -> Iterator[tuple[ShardedParam, Slot]]:
    """The sharded parameters of `module` and of those below it, and each place of theirs."""
    return ((param, slot) for unit in module_units(module) for param in unit.params for slot in param.slots)


class UnshardHandle(TorchUnshardHandle):
    """The result of `unshard(async_op=True)`: the parameters are usable after `wait()`."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """Put the full parameters on the module. Later calls do nothing."""
        unit, self._unit = self._unit, None
        if unit is not None:
            hooks_of(unit).outside(_wait_unshard, unit)


if TYPE_CHECKING:

    class _Sharded(TorchFSDPModule, nn.Module):
        """Tells a type checker that only modules have this class, beside their own."""

else:
    _Sharded = TorchFSDPModule


class FSDPModule(_Sharded):
    """Base class, beside the module's own class, of a module to which `fully_shard` was applied.

    The setters act on this module, or with `recurse=True` also on all sharded modules below it. Unsupported methods
    raise `NotImplementedError`.
    """

    # Position of the module's own class in the method resolution order of FSDP<Class>: as in torch, because dynamo and
    # others hard-code it.
    _orig_cls_mro_index = 2

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # `type(module)(...)`, as slicing a container does, makes an unsharded module of the original class.
        original = cls.__mro__[cls._orig_cls_mro_index]
        made = original.__new__(original, *args, **kwargs)
        made.__init__(*args, **kwargs)
        return made

    # ---- parameters ----------------------------------------------------------------------------------------

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters on the modules, full ones too, as in torch. To torch's `get_state_dict` and its like it
        shows
        the sharded ones at any moment: they look up in it what the optimizer holds."""
        named = cast(Any, super()).named_parameters(*args, **kwargs)
        if torch.compiler.is_compiling() or not _is_looked_up():
            return cast("Iterator[tuple[str, nn.Parameter]]", named)
        shards = {id(slot.get()): standing_parameter(param) for param, slot in _slots(cast(nn.Module, self))}
        return ((name, shards.get(id(parameter), parameter)) for name, parameter in named)

    # ---- full parameters -----------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """All-gather this module's parameters (not those of units below) and put them on the module.

        async_op: return a handle at once; the parameters are full after `handle.wait()` or in the next forward.
        They stay full until `reshard()` or the next forward or backward that reshards.
        """
        expect_flag("async_op", async_op)
        unit = self._unit()
        hooks_of(unit).outside(_unshard, unit, not async_op)
        return UnshardHandle(unit) if async_op else None

    def reshard(self) -> None:
        """Free this module's full parameters and put the sharded ones on the module."""
        unit = self._unit()
        hooks_of(unit).outside(_reshard, unit)

    # ---- when to communicate -------------------------------------------------------------------------------

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """False: the following backwards accumulate unsharded gradients on each rank instead of reducing them.

        The first backward with True reduces the accumulated gradients with its own (seed 001: `no_sync`). Until then
        they take the bytes of the unsharded model in the reduce dtype. `.grad` of sharded parameters is a marker:
        `zero_grad()` clears it, any other use raises. `.grad` of full parameters is this rank's sum, as in torch: not
        averaged, and in the reduce dtype; what is written to it counts.
        """
        requires_gradient_sync = expect_flag("requires_gradient_sync", requires_gradient_sync)
        if requires_gradient_sync:
            note_stage(cast(nn.Module, self))
        for unit in self._units(recurse):
            unit.record.plan.sync = requires_gradient_sync

    # Memory limits; the last three are deprecated names of the first.
    set_memory_budget = settings.set_memory_budget

    # How gradients are reduced.
    set_requires_all_reduce = settings.set_requires_all_reduce
    set_gradient_divide_factor = settings.set_gradient_divide_factor
    set_reduce_scatter_divide_factor = settings.set_reduce_scatter_divide_factor
    set_force_sum_reduction_for_comms = settings.set_force_sum_reduction_for_comms
    set_all_reduce_hook = settings.set_all_reduce_hook
    set_custom_all_gather = settings.set_custom_all_gather
    set_custom_reduce_scatter = settings.set_custom_reduce_scatter
    set_allocate_memory_from_process_group_for_comm = settings.set_allocate_memory_from_process_group_for_comm
    set_communication = settings.set_communication
    set_reduce_scatter_unused_params = settings.set_reduce_scatter_unused_params
    set_reduce_scatter_max_input_buffers = settings.set_reduce_scatter_max_input_buffers
    set_separate_reduce_scatter_group = settings.set_separate_reduce_scatter_group

    # Steps that end where the user says, and storages that stay.
    set_manual_backward_finalization = finalization.set_manual_backward_finalization
    finalize_backward = finalization.finalize_backward
    set_keep_unsharded_storage = settings.set_keep_unsharded_storage

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """False: more backwards through the same forwards follow; keep the recorded order that they need."""
        is_last_backward = expect_flag("is_last_backward", is_last_backward)
        unit = self._unit()
        unit.settings.is_last_backward = is_last_backward
        root = formed(unit)
        if root is not None:
            root.run.ending.is_last = is_last_backward

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether to reshard after forward, from the next forward on; also replaces an integer."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"reshard_after_forward: expected a bool, found {reshard_after_forward!r}; "
                f"degrees are given to fully_shard"
            )
        for unit in self._units(recurse):
            unit.settings.reshard_after_forward = reshard_after_forward
            unit.record.plan.reshard_after_forward = reshard_after_forward
            unit.record.plan.keeps_secondary = False

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether to reshard after backward. Parameters kept full are all-gathered again once the shards change."""
        reshard_after_backward = expect_flag("reshard_after_backward", reshard_after_backward)
        for unit in self._units(recurse):
            unit.record.plan.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: list[Any]) -> None:
        """Prefetch the parameters of `modules` when this module's forward begins, instead of the recorded order."""
        units = validate.check_sharded(modules, "set_modules_to_forward_prefetch", unit_of)
        self._unit().record.plan.forward_prefetch = tuple(unit.record for unit in units)

    def set_modules_to_backward_prefetch(self, modules: list[Any]) -> None:
        """Prefetch the parameters of `modules` when this module's backward begins, instead of the recorded order."""
        units = validate.check_sharded(modules, "set_modules_to_backward_prefetch", unit_of)
        self._unit().record.plan.backward_prefetch = tuple(unit.record for unit in units)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """False: backward does not unshard this module's parameters, because it does not read them (an embedding).

        Affects only this module's own parameters. Full parameters stay full until their gradients are ready. The next
        forwards watch saved weights: if backward reads one after all, it is all-gathered then, late but correct.
        """
        expect_flag("unshard_in_backward", unshard_in_backward)
        unit = self._unit()
        unit.record.plan.gathers_in_backward = bool(unshard_in_backward)
        unit.reads.left = max(unit.reads.left, HOOKED_FORWARDS)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let the root's next forward and its all-gathers wait for `event`, which an optimizer's stream recorded.

        Holds for one forward. All-gathers are issued in the order of the compute stream, so the event can only delay
        them. On a CPU the event is ignored.

        event: a `torch.Event` or one of a device module (`torch.cuda.Event`); None removes the last one.
        Raises `TypeError` for anything else.
        """
        if event is not None and not (isinstance(event, torch.Event) or callable(getattr(event, "wait", None))):
            raise TypeError(
                f"event: expected a torch.Event, found {type(event).__name__}; pass stream.record_event() of the "
                f"optimizer's stream"
            )
        unit = self._unit()
        first = unit if unit.root is None else unit.root.units[0]
        first.settings.post_optim_event = event

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Has no effect; accepted as in torch, where True selects asynchronous all-gathers on the compute stream,
        without a staging stream. All-gathers here always work that way.

        Raises `TypeError` for anything but a bool.
        """
        if not isinstance(async_op, bool):
            raise TypeError(f"async_op: expected a bool, found {async_op!r}; gathers are asynchronous with either")

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Refuse staging buffers in NCCL's symmetric memory.

        Raises `RuntimeError` for a backend or process groups other than NCCL, otherwise `NotImplementedError`: it could
        not be tested on a device that supports it.
        """
        backends = sorted({group.placing.backend for group in self._unit().groups})
        if backend != "NCCL" or backends != ["nccl"]:
            raise RuntimeError(
                f"backend: expected 'NCCL' and parameters exchanged by it, found {backend!r} and parameters exchanged "
                f"by {', '.join(backends) or 'no backend'}; leave the call out: nothing else has symmetric memory"
            )
        raise validate.not_built(
            "set_symm_mem_for_comm", backend, "use set_allocate_memory_from_process_group_for_comm(True)"
        )

    def reset_iter_state(self) -> None:
        """Discard the state of a failed step (root only, as in torch). Optional: the next forward does it too."""
        unit = self._unit()
        root = formed(unit)
        if root is None:
            return
        if root.units[0] is not unit:
            raise RuntimeError(
                f"reset_iter_state: expected the root module, found {unit.record.name} below it; call it on the root"
            )
        root.reset()

    # ---- nn.Module methods ---------------------------------------------------------------------------------

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """`to`, `to_empty`, `float`, ... on sharded parameters, which stay views of one flat buffer.

        Tensors from `to_empty` are tracked until they are written; buffers that have data keep it
        (docs/initialisation.md).
        """
        if self._unit() in filling:  # an initialiser of FSDP1's form begins with `to_empty`
            return super()._apply(fn, recurse)
        refuse_opened(self._unit(), "a conversion of the module")
        self.reshard()
        conversion = Conversion.of(fn)
        emptied = conversion.emptied
        unit = self._unit()
        with noting_emptied(unit, cast(nn.Module, self), recurse=recurse):
            result = super()._apply(conversion, recurse)  # the module's class: torch's comes after nn.Module
        unit.repair()
        if conversion.emptied != emptied:
            note_uninitialized(unit)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients as `nn.Module.zero_grad`, but always of the sharded parameters: many loops call this between
        forward and
        backward, when the root's full parameters are on the module."""
        if type(set_to_none) is not bool:
            expect_flag("set_to_none", set_to_none)
        super().zero_grad(set_to_none)  # the module's class has it
        for unit in self._units(recurse=True):
            for param in unit.params:
                gradient = param.sharded.grad
                if gradient is not None and not set_to_none:
                    gradient.detach_().zero_()
                elif gradient is not None:
                    param.sharded.grad = None
                if param.gradients.held is not None:
                    param.gradients.live_held()  # cleared now: the full parameters show it no longer

    def _get_fsdp_state(self) -> StateView:  # type: ignore[override]
        """The state in the form that torch's own code reads."""
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
        # `zero_grad` asks in every step.
        every = recurse is True or expect_flag("recurse", recurse)
        return module_units(cast(nn.Module, self)) if every else [self._unit()]

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise AssertionError(
            f"FSDP does not support deepcopy: expected a module that is not sharded, found {type(self).__name__}, "
            f"which holds process groups and one flat buffer. For an average (AveragedModel): "
            f"fullshard.average(model, decay=0.999). For another copy that is trained or run: copy the model before "
            f"fully_shard, then apply fully_shard to the modules of both. For its values: "
            f"copy.deepcopy(model.state_dict()), which load_state_dict takes, of this model or of one that is built "
            f"and sharded anew"
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


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Share communication buffers between models that run side by side, such as the chunks of a pipeline stage.

    modules: roots; they use the first one's message buffers from now on, and share one limit on reductions in flight.
        Call it before the first forward, or between steps. An empty list does nothing.
    Raises `ValueError` for unsharded modules or several devices, `RuntimeError` while messages are in flight.
    """
    units = validate.check_sharded(modules, "modules", unit_of)
    devices = sorted({str(unit.device) for unit in units})
    if len(devices) > 1:
        raise ValueError(f"modules: expected one device, found {', '.join(devices)}; share among those of one device")
    if not units:
        return
    first = units[0]
    root = formed(first)
    shared = root.shared if root is not None else first.settings.shared or Shared(keep=first.device.type == "cpu")
    for unit in units:
        root = formed(unit)
        if root is not None:
            root.share(shared)
        unit.settings.shared = shared
