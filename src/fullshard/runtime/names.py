"""Dotted names of modules and parameters, as the user's own code spells them."""

from __future__ import annotations

# Names that wrappers insert into dotted names.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")


def clean_name(name: str) -> str:
    """`name` without what recomputation and compile wrappers insert into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "").removesuffix("." + wrapper.rstrip("."))
    return name
