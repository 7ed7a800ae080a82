"""`install`: unmodified programs, which import FSDP2 from torch, run on fullshard.

What is swapped are the functions. Torch's classes stay: our sharded modules and handles are instances of them, and its
policy objects are accepted, so programs find what they expect, and modules that torch sharded are recognised as before.
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
# (module, name, what torch had there) of every name that is swapped now; empty: not installed.
_swapped: list[tuple[ModuleType, str, Any]] = []
_LOCK = threading.Lock()


class Installation:
    """What `install` returns: in a `with` statement, the names are torch's again at its end.

    Unless they were ours already when it was made: then an outer one, or `uninstall()`, puts them back.
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
    """Let `fully_shard` and the functions beside it, as torch's modules show them, be those of fullshard.

        fullshard.install()
        from torch.distributed.fsdp import fully_shard  # ours
        import accelerate  # what imports it from now on gets ours

    The names are `fully_shard`, `register_fsdp_forward_method` and `share_comm_ctx`, in `torch.distributed.fsdp` and in
    the old `torch.distributed._composable.fsdp`. For this process, all its threads, and until `uninstall()`; as a
    context manager, for a block. Repeated calls change nothing.

    A module that imported such a name *before* holds torch's function, which cannot be taken back from it: a
    `UserWarning` names those that did. Modules imported meanwhile keep ours after `uninstall()`, as it is with any
    import. Returns an `Installation`. Source: no counterpart in torch.
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
                f"{', '.join(held)}, which go on calling torch's; call fullshard.install() before they are imported",
                UserWarning,
                stacklevel=2,
            )
        except UserWarning:  # where warnings are errors, this call has failed
            uninstall()
            raise
    return Installation(made_here=True)


def uninstall() -> None:
    """Put back what `install` swapped, the very objects; without an `install` before it, nothing.

    A name that somebody else replaced meanwhile is theirs, and stays: a `UserWarning` says which.
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
            f"{', '.join(foreign)}, which stay; whoever replaced them is to put torch's back",
            UserWarning,
            stacklevel=2,
        )


def _held_elsewhere(originals: set[int]) -> list[str]:
    """`module.name` of every global, outside of torch and of this package, that is one of these functions."""
    found = []
    for module_name, module in sorted(sys.modules.items()):
        if module_name.partition(".")[0] in ("torch", "fullshard") or not isinstance(module, ModuleType):
            continue
        # A copy: modules that import lazily grow while they are looked at.
        for name, value in list(vars(module).items()):
            if id(value) in originals:
                found.append(f"{module_name}.{name}")
    return found
