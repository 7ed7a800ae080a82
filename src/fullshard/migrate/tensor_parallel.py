"""Dividing a model's modules over one axis by styles: torch's `parallelize_module`, with what it leaves to the caller.

Styles come from the plan, then from the model: its own `parallel_styles(sequence)`, or Hugging Face's plan. Parameters
are replaced, so tied ones are tied again, and optimizers that hold the old ones get the new ones (`Replaced`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement

from ..keys import ConfigError
from .parallelism import ModelShape, Parallelism
from .styles import CUT, SEQUENCE, WHOLE, Style, expanded, of_hugging_face
from .tree import Tree, class_of, nearest

_PLACEMENTS: dict[str, Placement] = {WHOLE: Replicate(), SEQUENCE: Shard(1), CUT: Shard(-1)}
# Of a norm over heads, whose input is (batch, tokens, heads, width of a head).
_HEADS = Shard(2)


@dataclass(frozen=True)
class Division:
    """The style of each module that has one, by name. sequence: whether parts of sequences are between the layers.
    head: the layer whose output stays cut for the loss, "" if none does."""

    styles: Mapping[str, Style]
    sequence: bool = False
    head: str = ""

    def lines(self) -> list[str]:
        """Styles with the names of their modules, where the first number in a name is written `*`."""
        found: dict[str, dict[str, None]] = {}
        for name, style in self.styles.items():
            parts = name.split(".")
            number = next((place for place, part in enumerate(parts) if part.isdigit()), len(parts))
            pattern = ".".join([*parts[:number], *["*"] * (number < len(parts)), *parts[number + 1 :]])
            found.setdefault(str(style), {})[pattern] = None
        return [f"{style}: {', '.join(names)}" for style, names in found.items()]


def divide(tree: Tree, plan: Parallelism) -> Division:
    """Decide which modules are divided, and how. Raises `ConfigError` for a model without styles, for names and classes
    that styles do not fit, and for a tied parameter that two styles divide in different ways."""
    if plan.tensor_parallel_degree == 1:
        return Division({})
    model = tree.model
    own = {name: text for name, text in plan.styles if Style.read(text).kind != "expert"}
    sequence, of_model = _of_model(model, plan, own)
    names = [name for name in tree.names.values() if name]
    found, unmatched = expanded(of_model, names)
    asked, unknown = expanded(own, names)
    for pattern in unknown:
        raise ConfigError(
            f'parallelism.styles["{pattern}"]: expected names of modules of {class_of(model)}, found none that match'
            f"{nearest(pattern, names)}"
        )
    _check_layouts(found, asked)
    found = {name: asked.get(name, found.get(name)) for name in names if name in asked or name in found}  # type: ignore[misc]
    _untie(tree, found, asked)
    found = {name: style for name, style in found.items() if style.kind != "keep"}
    _check_classes(tree, found)
    if not any(style.divides for style in found.values()):
        raise ConfigError(
            f"parallelism.tensor_parallel_degree = {plan.tensor_parallel_degree}: expected a layer to divide in "
            f"{class_of(model)}, found none; give styles, such as "
            f'{{"layers.*.up" = "column", "layers.*.down" = "row"}}; nearest valid: tensor_parallel_degree = 1'
        )
    head = ""
    if plan.enable_loss_parallel:
        head = _head(tree, found)
        style = found[head]
        found[head] = Style(style.kind, style.before, CUT)
    return Division(found, sequence, head)


def shape_for(tree: Tree, division: Division, shape: ModelShape) -> ModelShape:
    """`shape` without what no style divides: a vocabulary that stays whole may have any size."""
    cut = any(
        style.divides and shape.vocabulary in tuple(getattr(tree.modules[name], "weight", torch.empty(0)).shape[:1])
        for name, style in division.styles.items()
    )
    return shape if cut else replace(shape, vocabulary=0)


def shape_of(model: nn.Module) -> ModelShape:
    """Returns the shape that the model's own configuration describes."""
    given = getattr(model, "model_shape", None)
    return given() if callable(given) else ModelShape.of(getattr(model, "config", None))


def _of_model(model: nn.Module, plan: Parallelism, own: Mapping[str, str]) -> tuple[bool, dict[str, str]]:
    """Whether parts of sequences are between the layers, and the styles that the model has itself."""
    wanted = plan.enable_sequence_parallel
    styles = getattr(model, "parallel_styles", None)
    if callable(styles):
        sequence = wanted is not False
        return sequence, dict(styles(sequence=sequence))
    given = any(SEQUENCE in (style.before, style.after) for style in map(Style.read, own.values()))
    if wanted is True and not given:
        raise ConfigError(
            f"parallelism.enable_sequence_parallel = true: expected styles with parts of sequences, found none in "
            f'the plan of {class_of(model)}; give them in parallelism.styles; nearest valid: "auto"'
        )
    theirs = getattr(model, "tp_plan", None) or {}
    return given, of_hugging_face(theirs) if isinstance(theirs, Mapping) else {}


def _check_layouts(own: Mapping[str, Style], asked: Mapping[str, Style]) -> None:
    """Raise for a style of the user's that breaks the way of parts of sequences through the model's own styles."""
    for name, style in asked.items():
        theirs = own.get(name)
        if theirs is None or style == theirs:
            continue
        for which in ("before", "after"):
            if (getattr(theirs, which) == SEQUENCE) != (getattr(style, which) == SEQUENCE):
                raise ConfigError(
                    f'parallelism.styles["{name}"] = "{style}": expected the layouts of the model\'s own style, '
                    f'"{theirs}", because ranks have parts of sequences there; nearest valid: "{theirs}", or '
                    f"enable_sequence_parallel = false"
                )


def _untie(tree: Tree, found: dict[str, Style], asked: Mapping[str, Style]) -> None:
    """Leave modules whole that share a parameter which their styles would divide differently; raise if these are the
    user's."""
    for parameter, places in tree.slots().items():
        owners = list(dict.fromkeys(tree.names[tree.modules[module]] for module, _ in places))
        cuts = {_cut_dim(tree, owner, found.get(owner)) for owner in owners}
        if len(owners) < 2 or len(cuts) == 1:
            continue
        if mine := [owner for owner in owners if owner in asked and asked[owner].kind != "keep"]:
            others = " and ".join(f"{owner} ({found.get(owner, 'keep')})" for owner in owners)
            raise ConfigError(
                f'parallelism.styles["{mine[0]}"] = "{asked[mine[0]]}": expected one way to divide the parameter of '
                f'{tuple(parameter.shape)} that {others} share; nearest valid: "keep" for both'
            )
        for owner in owners:
            found[owner] = Style.read("keep")


def _cut_dim(tree: Tree, name: str, style: Style | None) -> int | str | None:
    """The dim of the weight that `style` divides; None if it stays plain."""
    if style is None or style.kind in ("keep", "input"):
        return None
    if not style.divides:
        return "replicated"
    along = 0 if style.kind == "column" else 1
    return 1 - along if isinstance(tree.modules[name], nn.Embedding) else along


def _check_classes(tree: Tree, found: Mapping[str, Style]) -> None:
    for name, style in found.items():
        module = tree.modules[name]
        if style.divides and not isinstance(module, (nn.Linear, nn.Embedding)):
            raise ConfigError(
                f'parallelism.styles["{name}"] = "{style}": expected an nn.Linear or nn.Embedding, found a '
                f'{class_of(module)}, which torch cannot divide; nearest valid: "keep"'
            )


def _head(tree: Tree, found: Mapping[str, Style]) -> str:
    """The layer that gives the logits: what Hugging Face calls the output embeddings, else the last one whose output
    is put together."""
    ask: Any = getattr(tree.model, "get_output_embeddings", None)
    module = ask() if callable(ask) else None
    heads = [name for name, style in found.items() if style.kind == "column" and style.after in (WHOLE, CUT)]
    heads = [name for name in heads if tree.modules[name] is module or (module is None and found[name].after == WHOLE)]
    if not heads:
        raise ConfigError(
            "parallelism.enable_loss_parallel = true: expected a head that is cut along the vocabulary, found none "
            "(a tied one stays whole); nearest valid: false"
        )
    return heads[-1]


# ---- application -----------------------------------------------------------------------------------------------------


@dataclass
class Replaced:
    """The parameters that dividing replaced: the old ones with the new ones."""

    pairs: list[tuple[nn.Parameter, nn.Parameter]] = field(default_factory=list)

    def successors(self) -> dict[int, nn.Parameter]:
        return {id(old): new for old, new in self.pairs}

    def rebind(self, optimizer: torch.optim.Optimizer) -> None:
        """Give an optimizer of the old parameters the new ones, and its state their parts. No messages."""
        successors = self.successors()
        for group in optimizer.param_groups:
            group["params"][:] = [successors.get(id(p), p) for p in group["params"]]
        for old, new in self.pairs:
            if old in optimizer.state:
                entries = optimizer.state.pop(old)
                optimizer.state[new] = {key: _part_of(value, old, new) for key, value in entries.items()}


def _part_of(value: Any, old: Tensor, new: nn.Parameter) -> Any:
    whole = isinstance(value, Tensor) and not isinstance(value, DTensor) and value.shape == old.shape and value.ndim
    if not whole or not isinstance(new, DTensor):
        return value
    return distribute_tensor(value, new.device_mesh, new.placements, src_data_rank=None)


def apply_styles(tree: Tree, division: Division, names: Iterable[str], mesh: DeviceMesh, replaced: Replaced) -> None:
    """Divide the modules `names` over `mesh`, which has one axis. Each rank keeps its part of its own values, or of
    nothing on the meta device: no messages. Tied parameters of modules with one style stay tied."""
    for name in names:
        module = tree.modules[name]
        before = dict(module.named_parameters(recurse=False))
        known = replaced.successors()
        _apply_style(module, division.styles[name], mesh, local=name != division.head)
        for attribute, old in before.items():
            new = module.get_parameter(attribute)
            if new is old:
                continue
            if id(old) in known:
                module.register_parameter(attribute, known[id(old)])
            else:
                new.__dict__.update(old.__dict__)
                replaced.pairs.append((old, new))


def _apply_style(module: nn.Module, style: Style, mesh: DeviceMesh, *, local: bool) -> None:
    before, after = _PLACEMENTS[style.before], _PLACEMENTS[style.after]
    how: ParallelStyle
    if style.kind == "column":
        how = ColwiseParallel(input_layouts=before, output_layouts=after, use_local_output=local)
    elif style.kind == "row":
        before = Replicate() if isinstance(module, nn.Embedding) else before
        how = RowwiseParallel(input_layouts=before, output_layouts=after)
    elif style.kind == "input":
        # Layers in it read a DTensor that is whole; a residual stream that begins with a part, the part itself.
        how = PrepareModuleInput(
            input_layouts=(before,), desired_input_layouts=(after,), use_local_output=style.after == SEQUENCE
        )
    else:
        _replicate(module, style, mesh)
        return
    parallelize_module(module, mesh, how, src_data_rank=None)


def _replicate(module: nn.Module, style: Style, mesh: DeviceMesh) -> None:
    """A module whose parameters are equal on all ranks, as DTensors, so that their gradients are summed where each
    rank has a part of what it works on."""
    heads = style.kind == "heads"
    before, after = (_HEADS, _HEADS) if heads else (_PLACEMENTS[style.before], _PLACEMENTS[style.after])
    inside = before if style.kind != "sequence" else Shard(1)
    # The next module takes the DTensor of a part of a sequence; others get a tensor.
    local = heads or style.after != SEQUENCE

    def parts(name: str, inner: nn.Module, mesh: DeviceMesh) -> None:
        for attribute, parameter in inner.named_parameters(recurse=False):
            value = distribute_tensor(parameter.detach(), mesh, [Replicate()], src_data_rank=None)
            inner.register_parameter(attribute, nn.Parameter(value, requires_grad=parameter.requires_grad))

    def enter(module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        first = inputs[0]
        if heads and first.ndim != 4:
            raise ValueError(
                f'{class_of(module)}: expected (batch, tokens, heads, width) for the style "heads", found '
                f'{tuple(first.shape)}; give the module the style "keep", with the layers around it'
            )
        if not isinstance(first, DTensor):
            first = DTensor.from_local(first, mesh, [before], run_check=False)
        return first.redistribute(placements=[inside]), *inputs[1:]

    def leave(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        output = output.redistribute(placements=[after])
        return output.to_local() if local else output

    # Its annotation says None, where torch takes what a forward pre-hook may return.
    into: Any = enter
    distribute_module(module, mesh, parts, into, leave)
