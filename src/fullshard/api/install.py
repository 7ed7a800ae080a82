"""`install`: run unmodified programs, which import FSDP2 from torch, on fullshard.

Only functions are swapped. Torch's classes stay: fullshard's modules and handles are instances of them, and torch's
policy objects are accepted, so `isinstance` checks work for modules sharded by either.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any

from .._torch import swappable
from .fully_shard import fully_shard, register_fsdp_forward_method
from .module import share_comm_ctx

_OURS: dict[str, Callable[..., Any]] = {
    "fully_shard": fully_shard,
    "register_fsdp_forward_method": register_fsdp_forward_method,
    "share_comm_ctx": share_comm_ctx,
}
# (module, name, torch's object) of every swapped name; empty: not installed.
_swapped: list[tuple[ModuleType, str, Any]] = []
_LOCK = threading.Lock()


class Installation:
    """The result of `install`: as a context manager, it restores torch's names at exit.

    If fullshard was installed before, it leaves that to the outer one or to `uninstall()`.
    """

    def __init__(self, *, made_here: bool) -> None:
        self._made_here = made_here

    def __enter__(self) -> Installation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._made_here:
            uninstall()


def install() -> Installation:
    """Replace torch's `fully_shard` and related functions by fullshard's, in torch's modules.

        fullshard.install()
        from torch.distributed.fsdp import fully_shard  # fullshard's
        import accelerate  # later imports get fullshard's

    Replaces `fully_shard`, `register_fsdp_forward_method` and `share_comm_ctx` in `torch.distributed.fsdp` and in the
    old `torch.distributed._composable.fsdp`, for all threads of this process, until `uninstall()`; as a context
    manager, for a block. Repeated calls change nothing.

    A module that imported such a name *before* keeps torch's function: a `UserWarning` names these modules. Modules
    imported meanwhile keep fullshard's after `uninstall()`, as with any import. Returns an `Installation`. Source: no
    counterpart in torch.
    """
    with _LOCK:
        if _swapped:
            return Installation(made_here=False)
        for name, ours in _OURS.items():
            _swapped.extend((module, name, theirs) for module, theirs in swappable(name))
            for module, _ in swappable(name):
                setattr(module, name, ours)
        held = _held_elsewhere({id(theirs) for _, _, theirs in _swapped})
    if held:
        try:
            warnings.warn(
                f"install: expected no module to have imported these functions from torch before, found "
                f"{', '.join(held)}, which still call torch's; call fullshard.install() before they are imported",
                UserWarning,
                stacklevel=2,
            )
        except UserWarning:  # warnings are errors: this call failed
            uninstall()
            raise
    return Installation(made_here=True)


def uninstall() -> None:
    """Restore torch's own objects; does nothing if not installed.

    A name that other code replaced meanwhile stays as it is: a `UserWarning` lists these names.
    """
    with _LOCK:
        foreign = []
        for module, name, theirs in _swapped:
            if vars(module).get(name) is _OURS[name]:
                setattr(module, name, theirs)
            else:
                foreign.append(f"{module.__name__}.{name}")
        _swapped.clear()
    if foreign:
        warnings.warn(
            f"uninstall: expected fullshard's functions where install() put them, found others at "
            f"{', '.join(foreign)}, which stay; restore torch's in the code that replaced them",
            UserWarning,
            stacklevel=2,
        )


def _held_elsewhere(originals: set[int]) -> list[str]:
    """`module.name` of every global outside of torch and fullshard that is one of these functions."""
    found = []
    for module_name, module in sorted(sys.modules.items()):
        if module_name.partition(".")[0] in ("torch", "fullshard") or not isinstance(module, ModuleType):
            continue
        # A copy: modules that import lazily grow during iteration.
        for name, value in list(vars(module).items()):
            if id(value) in originals:
                found.append(f"{module_name}.{name}")
    return found
