"""What torch refuses of sharded parameters, or passes over in silence, by their names (ADR 0028).

    F.linear(x, model.fc.weight)            beside forward: DTensor's operators see a plain tensor beside a DTensor
    torch.autograd.grad(loss, parameters)   the graph was made of the full parameters: "not used in the graph"
    loss.backward(inputs=parameters)        the same, and nothing is said: nothing would be trained

For the first one every operation on a sharded parameter passes by us. Optimizers take many and mix nothing, so during a
step of one it does not.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .._torch_compat import explain_unreached
from ..param import Owner, ShardedParameter, name_mixed
from .names import first_few
from .outside import outside_graphs

_registrations = itertools.count()


def name_refusals() -> None:
    """From now on torch's refusals name sharded parameters. Once in a process."""
    if next(_registrations) == 0:
        explain_unreached(ShardedParameter, _unreached)
        register_optimizer_step_pre_hook(outside_graphs(_step_begins))
        register_optimizer_step_post_hook(outside_graphs(_step_ends))


def _step_begins(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # A step in another thread is one beside a program that goes on meanwhile, and what that is told must not depend on
    # when it asks. A step that raised leaves names out until the next one is over.
    if threading.current_thread() is threading.main_thread():
        name_mixed(False)


def _step_ends(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    name_mixed(True)


def _unreached(parameters: Sequence[Tensor]) -> RuntimeError:
    owners = [owner for owner in map(Owner.of, parameters) if owner is not None]
    names = first_few([owner.name() for owner in owners]) if owners else "sharded parameters"
    return RuntimeError(
        f"{names}: expected loss.backward(), which leaves the gradients of this rank's shards in .grad, found a "
        f"backward for these parameters by themselves (torch.autograd.grad, or backward(inputs=...)); the graph was "
        f"made of the full parameters, and reaches none of these; call loss.backward() without inputs, and set "
        f"requires_grad_(False) before the forward on what is to get no gradient"
    )
