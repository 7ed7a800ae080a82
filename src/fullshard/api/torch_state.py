"""The state of a sharded module in the shape in which torch's own code reads it.

    who                     reads
    pipelining.stage        fully_shard.state(m)._state_ctx.all_states[*]._fsdp_param_groups[*].post_backward(), then
                            ._root_post_backward_final_callback(), after micro-batches without synchronisation
    dynamo, transformers    m._is_fsdp_managed_module, m._fsdp_use_orig_params of every module of a unit
    replicate, DDP          the registry of composable APIs

Nothing of ours reads these objects: they are views of a `Unit` and hold nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from .._torch_compat import mark_managed, publish_state
from ..runtime import Unit

_OF_UNIT = "_fullshard_torch_state"


class GroupView:
    """One of torch's parameter groups; ours have no post-backward of their own."""

    def post_backward(self, *_: object) -> None:
        """Nothing: what is held is sent, for all units in the order of the rules, by the callback that follows."""


class StateView:
    """One of torch's module states: that of `unit`, shared by its modules."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._fsdp_param_groups = [GroupView() for _ in unit.groups]
        self._modules = unit.modules

    @property
    def _fsdp_param_group(self) -> GroupView | None:
        return self._fsdp_param_groups[0] if self._fsdp_param_groups else None

    @property
    def _is_root(self) -> bool | None:
        root = self._unit.root
        return None if root is None or root.provisional else root.units[0] is self._unit

    @property
    def _state_ctx(self) -> ContextView:
        return ContextView(self._unit)

    def _root_post_backward_final_callback(self) -> None:
        """Reduce what backwards without synchronisation left, as far as synchronisation is on again."""
        if self._unit.root is not None:
            self._unit.root.reduce_held()


class ContextView:
    """What torch's states below one root share."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    @property
    def all_states(self) -> list[StateView]:
        root = self._unit.root
        units = [self._unit] if root is None else root.units
        return [state for unit in units if (state := torch_state_of(unit.module)) is not None]

    @property
    def is_last_backward(self) -> bool:
        root = self._unit.root
        return self._unit.is_last_backward if root is None else root.run.is_last_backward


def torch_state_of(module: nn.Module) -> StateView | None:
    """The state of `module`, or None when it is not sharded."""
    state = module.__dict__.get(_OF_UNIT)
    assert state is None or isinstance(state, StateView)
    return state


def publish(unit: Unit, managed: Iterable[nn.Module]) -> None:
    """Put the state of `unit` where torch's code looks; `managed`: every module whose parameters may be in it."""
    state = StateView(unit)
    for module in unit.modules:
        module.__dict__[_OF_UNIT] = state
        publish_state(module, state)
    for module in managed:
        mark_managed(module)
