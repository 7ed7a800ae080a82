"""Steps with a part of the gradients: a window of accumulation is open, and what it holds is not in `.grad`.

A backward without synchronisation, or without all-reduce, keeps what it brought on each rank. Where `.grad` was empty a
`PendingGrad` stands there, which refuses to be used; where an earlier backward was reduced, `.grad` has that part, and
a step would take it for the whole. So would an optimizer that steps parameter by parameter go half its way before it
meets a `PendingGrad`. The step is refused before it begins, if the optimizer has such parameters. With a closure the
backward that closes the window may still come.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .names import dotted_name, first_few
from .outside import outside_graphs

if TYPE_CHECKING:
    from .unit import Unit

_open: dict[int, weakref.ref[Unit]] = {}  # by identity
_registrations = itertools.count()


def note_window(unit: Unit) -> None:
    """A backward ended; `unit` may hold gradients now, or not any more."""
    if unit.window_open or unit.partial_open:
        if next(_registrations) == 0:
            register_optimizer_step_pre_hook(outside_graphs(_refuse_a_part))
        key = id(unit)
        _open[key] = weakref.ref(unit, lambda _: _open.pop(key, None))
    else:
        _open.pop(id(unit), None)


def _refuse_a_part(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not _open or any(callable(closure) for closure in (*args[1:2], kwargs.get("closure"))):
        return
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    names = []
    for reference in list(_open.values()):
        unit = reference()
        if unit is None:
            continue
        for param in unit.params:
            if id(param.sharded) in own and (param.live_held() is not None or param.live_partial() is not None):
                names.append(dotted_name(unit, param.name))
    if names:
        raise RuntimeError(
            f"{type(optimizer).__name__}.step: expected gradients that are reduced, found some that were only "
            f"accumulated on each rank, of {first_few(names)}: the last backward ran with "
            f"set_requires_gradient_sync(False) or set_requires_all_reduce(False), and the step would leave out what "
            f"it brought. Run the last micro-batch of the step with both True, or clear the gradients (zero_grad) to "
            f"give the window up"
        )
