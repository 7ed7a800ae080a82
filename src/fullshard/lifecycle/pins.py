"""Which full parameters have to stay in memory although their forward, or a backward, is over.

    running    a forward of the unit goes on: a backward inside of it (forces, a learning rule) does not end its use
    pins       backwards to come through graphs that hold weights and report nothing: those that a backward recorded
               (`create_graph`), and those made where saved tensors cannot be watched (transforms of torch.func)

A pin goes with the backward that it waits for: one that brings gradients and does not keep its graph. Where there is no
such backward, or one serves several forwards, it goes when the shards change, or with `reshard()`. Pinned memory is put
aside (SHELVED), because users have to find sharded parameters at any time.
"""

from __future__ import annotations

from .state import Full, RunRecord, UnitRecord

_THERE = (Full.FULL, Full.SHELVED)


def pin(unit: UnitRecord) -> None:
    """A backward through a graph that reports nothing will follow: one for all such graphs of one forward."""
    if unit.full in _THERE and (unit.used or not unit.pins):
        unit.pins += 1
        unit.used = False


def settle_pins(run: RunRecord, unit: UnitRecord, *, spent: bool, present: bool) -> bool:
    """A backward is over. `spent`: gradients came, and its graph is gone. `present`: `unit` has some.

    Whether its memory is to be put aside now."""
    if run.keep_full:
        pin(unit)
    elif unit.pins and spent and (present or unit.brought or unit.in_backward):
        unit.pins -= 1
    unit.brought = False
    return bool(unit.pins) and unit.full is Full.FULL and unit.reshard_after_backward and not unit.running


def is_held(run: RunRecord, unit: UnitRecord) -> bool:
    """Whether the weights of `unit` are read behind the backward that runs."""
    return run.keep_full or unit.running or unit.pins > 0
