"""Programs as users write them (tests/programs), run as they are with one import changed.

A program imports from `torch.distributed.fsdp`, builds and trains in `main()`, and returns what is to be compared:
models, optimizers, tensors and numbers, in tuples, lists and dicts. `run` reads its source, puts another module into
the place of torch's in that one import, and runs it in the process group that the ranks are in.
"""

from __future__ import annotations

import random
import re
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.harness.models import full_copy

FOLDER = Path(__file__).parents[1] / "programs"
# What the one import is from.
MODULES = {"torch": "torch.distributed.fsdp", "fullshard": "fullshard", "plain": "tests.harness.plain"}
_IMPORT = re.compile(r"^from torch\.distributed\.fsdp import ", re.M)


def load(name: str, impl: str) -> types.ModuleType:
    """The program as a module, with its import from the module of `impl`. Raises ValueError if it has not just one."""
    path = FOLDER / f"{name}.py"
    text, changed = _IMPORT.subn(f"from {MODULES[impl]} import ", path.read_text())
    if changed != 1:
        raise ValueError(f"{path}: expected one line that begins with {_IMPORT.pattern!r}, found {changed}")
    module = types.ModuleType(f"program_{name}_{impl}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses and dynamo look their module up
    exec(compile(text, str(path), "exec"), vars(module))
    return module


def run(name: str, impl: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """What the program returns, flat: full tensors and numbers by name. All ranks call it."""
    torch.manual_seed(0)
    random.seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        # What other packages deprecate among themselves is theirs.
        for kind in (FutureWarning, DeprecationWarning):
            warnings.filterwarnings("ignore", category=kind, module=r"(transformers|peft|lightning|accelerate)\.")
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # dynamo's own look
        flat: dict[str, Any] = {}
        _flatten(flat, "", load(name, impl).main())
        return flat
    finally:
        torch.set_default_dtype(before)


def _flatten(flat: dict[str, Any], path: str, value: Any) -> None:
    if isinstance(value, nn.Module):
        value = {**dict(value.named_parameters()), **dict(value.named_buffers())}
    elif isinstance(value, torch.optim.Optimizer):
        value = [value.state[p] for group in value.param_groups for p in group["params"]]
    if isinstance(value, Tensor):
        flat[path] = full_copy(value)
    elif isinstance(value, dict):
        for key, each in value.items():
            _flatten(flat, f"{path}.{key}", each)
    elif isinstance(value, (list, tuple)):
        for i, each in enumerate(value):
            _flatten(flat, f"{path}.{i}", each)
    else:
        flat[path] = value


def differences(actual: dict[str, Any], expected: dict[str, Any], digits: float = 0.0) -> list[str]:
    """What differs, by name. `digits`: of each tensor's maximum, how much may; 0 asks for equal bits (but for the sign
    of zero). One eps always may: what would be zero without rounding (the gradient of a key's bias) is rounding alone.
    """
    found = [f"{name}: only on one side" for name in sorted(actual.keys() ^ expected.keys())]
    for name, wanted in expected.items():
        if name not in actual:
            continue
        value = actual[name]
        if not isinstance(wanted, Tensor):
            if value != wanted and not (digits and abs(value - wanted) <= digits * abs(wanted)):
                found.append(f"{name}: {value!r} where {wanted!r}")
        elif (value.shape, value.dtype) != (wanted.shape, wanted.dtype):
            found.append(f"{name}: {tuple(value.shape)} of {value.dtype} where {tuple(wanted.shape)} of {wanted.dtype}")
        elif not torch.equal(value, wanted):
            off = (value.double() - wanted.double()).abs().max().item()
            scale = wanted.double().abs().max().item()
            if not (digits and off <= max(digits * scale, torch.finfo(value.dtype).eps)):
                found.append(f"{name}: off by {off:.3g} of {scale:.3g}")
    return found


# ---- docs/programs.md ----------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "programs.md"
_HEAD = """# Programs that were run

<!-- Written by `python -m tests.harness.programs --write`: change tests/programs/__init__.py, not this page. -->

Each program is a file of `tests/programs`, written for torch's FSDP2 as its users write it. The tests run it with the
one import from `torch.distributed.fsdp` changed, on gloo processes, and compare every parameter, buffer, optimizer
state and loss after its last step (`tests/procs/test_programs.py`) with the same program in plain data parallelism and
with torch's FSDP2.

* **bits**: equal bits. **digits**: not the same bits, because sums are made in another order; computed in float64 the
  two differ by less than half of the digits. **fails**: torch raises. **differs**: its result is another one, or wrong.
  **-**: it cannot run the program. Whatever is not *bits* has its reason.
* Two of them run in `make test`; the others in `make test-full`, torch's half wholly in `make test-all`.

"""


def page() -> str:
    """docs/programs.md as the table and the programs' first lines say."""
    import ast

    from tests.programs import PROGRAMS

    lines = ["| program | | ranks | plain | torch | |", "|---|---|---|---|---|---|"]
    for name, program in PROGRAMS.items():
        what = " ".join((ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text())) or "").split())
        notes = "; ".join(note for note in (program.why, program.warns and f"warns: {program.warns}") if note)
        plain, theirs = (kind.replace("none", "-") for kind in (program.plain, program.torch))
        link = f"[{name}](../tests/programs/{name}.py)"
        lines.append(f"| {link} | {what.rstrip('.')} | {program.ranks} | {plain} | {theirs} | {notes} |")
    equal = sum("bits" in (program.plain, program.torch) for program in PROGRAMS.values())
    return f"{_HEAD}{len(PROGRAMS)} programs, {equal} of them equal to one of the two bit by bit.\n\n" + "\n".join(
        [*lines, ""]
    )


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        raise SystemExit(f"usage: python -m tests.harness.programs --write    (writes {PAGE})")
    PAGE.write_text(page())
