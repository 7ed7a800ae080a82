"""`unit_open`: a unit's weights read outside of its forward, with gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ..engine import unit_of
from ..engine.hooks import hooks_of
from ..engine.root import module_units
from ..policy.arguments import expect_module


@contextmanager
def unit_open(module: nn.Module) -> Iterator[None]:
    """Inside the context the parameters of the sharded `module` are full, as in its forward, and may be read directly.

        hidden = model(tokens)
        with fullshard.unit_open(model.head):
            loss = fused_cross_entropy(hidden, model.head.weight, labels)
        loss.backward()

    For functions that take a weight instead of calling a module: fused or chunked cross-entropy. One use of the unit,
    like one forward: its gradients are reduced with those of the unit's other uses, and weights that backward reads are
    gathered again. `full_params` and `unshard()` show weights without that.

    module: one to which `fully_shard` was applied; only parameters of its own unit are opened, in `param_dtype`. What
        the block computes with them is not cast: cast inputs yourself.
    Collective where the unit is not full: all ranks open it, after the model's first forward began, in the same order.
    The unit owns the full parameters: they are freed at exit as after a forward, so do not keep them. Allowed inside of
    a forward, under `torch.no_grad()` (no gradients) and in recomputation. An exception in the block ends the step as
    one in a forward does.

    Raises `ValueError` for a module that is no unit, and names units in it; `RuntimeError` where saved-tensor hooks are
    disabled.
    """
    expect_module("module", module)
    unit = unit_of(module)
    if unit is None:
        inside = [type(below.module).__name__ for below in module_units(module)]
        found = f"which has {len(inside)} in it ({', '.join(inside[:4])})" if inside else "with none in it"
        raise ValueError(
            f"module: expected one to which fully_shard was applied, found {type(module).__name__}, {found}; open the "
            f"module whose unit has the parameter: the nearest one above it that was sharded"
        )
    with hooks_of(unit).opened(module):
        yield
