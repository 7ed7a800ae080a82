"""`Program`: a model, its loss and its batches, as the commands that look at a user's model take them.

# verify_me.py
def program() -> fullshard.Program:
    return fullshard.Program(model=Net, loss=lambda model, batch: model(batch).square().mean(), batch=my_batch)

$ fullshard verify verify_me:program
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh


class ProgramError(Exception):
    """An entry point that cannot be used; the message is one line for the user."""


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def shard_blocks(model: nn.Module, fully_shard: Callable[..., Any]) -> None:
    """Shard the blocks of `model`, then the rest: the classes that Hugging Face names in `_no_split_modules`, else the
    members of the `ModuleList`, `ModuleDict` or `Sequential` with the most parameters, and of others whose members are
    of one class with modules in it. Blocks inside of others, and blocks with a
    parameter that is tied to one outside, belong to what is around them."""
    for block in blocks_apart(model):
        fully_shard(block)
    fully_shard(model)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of `model`, as `shard_blocks` looks for them, in the order of `model.modules()`."""
    named = set(getattr(model, "_no_split_modules", None) or ())
    blocks = [module for module in model.modules() if type(module).__name__ in named and module is not model]
    if blocks:
        return blocks
    kinds = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
    lists = [module for module in model.modules() if isinstance(module, kinds)]
    largest = max(lists, key=lambda found: sum(p.numel() for p in found.parameters()), default=None)
    if largest is None:
        return []
    chosen = _members(largest)
    inside = {module for child in chosen for module in child.modules()}
    for other in lists:
        if other is not largest and not inside.intersection(other.modules()) and _are_blocks(_members(other)):
            chosen += _members(other)
            inside.update(other.modules())
    places = {module: place for place, module in enumerate(model.modules())}
    return sorted((child for child in chosen if child is not model), key=places.__getitem__)


def _members(found: nn.Module) -> list[nn.Module]:
    """Returns those with parameters. Of a list in a list, its members: a list has no forward."""
    members: list[nn.Module] = []
    for child in found.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            members += _members(child)
        elif next(child.parameters(), None) is not None:
            members.append(child)
    return members


def _are_blocks(members: list[nn.Module]) -> bool:
    """Whether they are of one class, with modules in it: the other half of an encoder and a decoder, not a head."""
    return len(members) > 1 and len({type(child) for child in members}) == 1 and any(members[0].children())


def blocks_apart(model: nn.Module) -> list[nn.Module]:
    """`blocks_of`, without those that are inside of others or share a parameter with what is outside of them."""
    uses = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    kept: list[nn.Module] = []
    inside = set[nn.Module]()
    for block in blocks_of(model):
        own = Counter(id(p) for module in block.modules() for p in module.parameters(recurse=False))
        if block not in inside and all(uses[each] == count for each, count in own.items()):
            kept.append(block)
            inside.update(block.modules())
    return kept


# ---- modules that compute in the dtype of their parameters -----------------------------------------------------------

# What users call torch's base class of its BatchNorms, SyncBatchNorm included.
BATCH_NORM = "BatchNorm"
_BASES = {BATCH_NORM: "_BatchNorm"}


def modules_of(model: nn.Module, names: Iterable[str]) -> list[nn.Module]:
    """Modules in `model` whose class, or a class that it derives from, has one of `names`; `*` stands for any text, and
    "BatchNorm" for every BatchNorm of torch.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LayerNorm(4))
    >>> [type(module).__name__ for module in modules_of(model, ["BatchNorm", "*RMSNorm"])]
    ['BatchNorm1d']
    """
    wanted = [_BASES.get(name, name) for name in names]
    return [
        module
        for module in model.modules()
        if any(fnmatchcase(cls.__name__, name) for cls in type(module).__mro__ for name in wanted)
    ]


class OwnDtype:
    """A `param_dtype_override_fn`: all parameters of `modules` compute in their own dtype, the others in `param_dtype`.

    It holds modules and not parameters, which would keep them alive, whole, after they were sharded.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.modules = tuple(modules)

    def __call__(self, parameter: nn.Parameter) -> torch.dtype | None:
        kept = any(parameter is own for module in self.modules for own in module.parameters())
        return parameter.dtype if kept else None


# ---- programs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """The parts that a command needs to train a few steps of a model.

    model: builds the plain model, not sharded, on the CPU; called in several processes, after the generators of torch,
        of Python's `random` and, if it was imported, of numpy were seeded.
    loss: (model, batch) -> a scalar tensor, the mean over the batch; it calls the model as training does.
    batch: (index) -> the batch of that number: equal for equal numbers, in every process. Each rank, micro-batch and
        step takes another number, from 0. Tensors in it, also inside of dicts, lists and tuples, are moved to the
        device.
    shard: (model, fully_shard) -> None, applies `fully_shard` as the user's program does, to inner modules first;
        options that it passes go before those of the command. Default: `shard_blocks`.
    optimizer: (parameters) -> the optimizer. Default: AdamW with a learning rate of 1e-3.
    `parallelize`: (model, mesh) -> None, splits the model over the one-dimensional mesh of tensor parallelism, with
        torch's `parallelize_module`; called before `shard`, where a strategy asks for it. What it returns, if that is
        callable, makes a context in which the loss and its backward run, such as torch's `loss_parallel`. None: the
        styles of the model itself, as `prepare_fully_shard(parallelism=)` takes them.
    `loss_fn`: (output, target) -> what `loss` computes, for pipelines, whose last stage calls it. Batches are then
        (inputs, ..., target), or a mapping with "labels".
    """

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]
    batch: Callable[[int], Any]
    shard: Callable[[nn.Module, Callable[..., Any]], object] = shard_blocks
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = _adamw
    parallelize: Callable[[nn.Module, DeviceMesh], object] | None = None
    loss_fn: Callable[[Any, Tensor], Tensor] | None = None


def find_program(entry: str) -> Program:
    """The program of `entry`, "module:function": what the function returns. "module:function:text" calls it with that
    text. The current directory is searched first. Raises `ProgramError`."""
    module_name, _, name = entry.partition(":")
    name, _, text = name.partition(":")
    if not module_name or not name:
        raise ProgramError(f"{entry}: expected module:function, such as verify_me:program for verify_me.py")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name.partition(".")[0] and error.name != module_name:
            raise ProgramError(
                f"{entry}: {module_name} needs the module {error.name}, which is not installed"
            ) from error
        raise ProgramError(
            f"{entry}: found no module {module_name} in {os.getcwd()} or among installed ones"
        ) from error
    except (Exception, SystemExit) as error:
        what = f"{type(error).__name__}: {_first_line(error)}"
        raise ProgramError(f"{entry}: {module_name} cannot be imported: {what}") from error
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise ProgramError(f"{entry}: {module_name} has no {name}")
        found = getattr(found, part)
    made = found
    if callable(found):
        try:
            inspect.signature(found).bind(*[text] * bool(text))
        except TypeError as error:
            given = f"the text {text!r}" if text else "no argument"
            raise ProgramError(f"{entry}: expected a function that takes {given}: {error}") from error
        try:
            made = found(*[text] * bool(text))
        except ProgramError:
            raise
        except (Exception, SystemExit) as error:
            raise ProgramError(f"{entry}: the function raised {type(error).__name__}: {_first_line(error)}") from error
    if not isinstance(made, Program):
        raise ProgramError(
            f"{entry}: expected a function that returns a fullshard.Program, found one that returns a "
            f"{type(made).__name__}"
        )
    return made


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def parts_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Tensor]:
    """The inputs and the target of a batch: the last of a tuple or list, the entry `labels` of a mapping, whose first
    entry is the input of the first stage. Raises `ProgramError` for another."""
    if isinstance(batch, (tuple, list)) and len(batch) > 1 and isinstance(batch[-1], Tensor):
        return tuple(batch[:-1]), {}, batch[-1]
    if isinstance(batch, Mapping) and isinstance(batch.get("labels"), Tensor) and len(batch) > 1:
        rest = {key: value for key, value in batch.items() if key != "labels"}
        first = next(iter(rest))
        return (rest.pop(first),), rest, batch["labels"]
    raise ProgramError(
        f"pp: expected batches (inputs, ..., target), or a mapping with labels, found a {type(batch).__name__}; return "
        f"the target apart from the inputs"
    )


def to_device(batch: Any, device: torch.device) -> Any:
    """`batch` with its tensors on `device`."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, dict):
        return type(batch)({key: to_device(value, device) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
