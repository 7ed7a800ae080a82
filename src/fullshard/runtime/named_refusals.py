"""Operations on sharded parameters pass by us, for their names in DTensor's complaints (ADR 0028): but not in the step
of an optimizer, which takes many and mixes nothing.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..param import name_mixed
from .outside import outside_graphs

_registrations = itertools.count()


def name_refusals() -> None:
    """From now on it is so. Once in a process."""
    if next(_registrations) == 0:
        register_optimizer_step_pre_hook(outside_graphs(_step_begins))
        register_optimizer_step_post_hook(outside_graphs(_step_ends))


def _step_begins(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # A step in another thread is one beside a program that goes on meanwhile, and what that is told must not depend on
    # when it asks. A step that raised leaves names out until the next one is over.
    if threading.current_thread() is threading.main_thread():
        name_mixed(False)


def _step_ends(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    name_mixed(True)
