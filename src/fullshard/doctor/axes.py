"""Facts about axes beside data parallelism: the rules that a declaration breaks, and a step of the model divided by it.

The step runs over a fake group, as the first rank along `tp`: shapes are those of the launch. They are compared with
those of the plain model: where a product, a sum or attention gets a smaller dim than there, and no divided layer is
around it, ranks would have to add what they have, and nothing does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import fullshard
from fullshard.migrate.declared import Declared, broken_rules, declare, parallelize_by
from fullshard.migrate.parallelism import Parallelism
from fullshard.migrate.relations import tensors_in
from fullshard.program import Program

from .facts import Axes
from .steps import failure_of

_NOT_USERS = (str(Path(torch.__file__).parent), str(Path(fullshard.__file__).parent))
_SPLIT = (
    "what reads the output of a divided layer has this rank's part of the features: write view(batch, tokens, -1, "
    "head_dim) and not the number of heads, give the layer a style that puts its output together (column->whole), or "
    'leave it whole ("keep")'
)


def look_at_rules(
    program: Program, build: Callable[[], nn.Module], plan: Parallelism, world: int
) -> tuple[Axes, Declared | None]:
    """The rules that `plan` breaks for the model that `build` makes, on `world` ranks; and the axes, if none."""
    model = build()
    sequence = _sequence(program, model)
    broken, nearest = broken_rules(model, plan, world, sequence=sequence)
    if broken:
        return Axes(tuple(broken), nearest), None
    return Axes(), declare(model, plan, world, sequence=sequence)


def look_at_step(program: Program, model: nn.Module, plan: Parallelism, mesh: DeviceMesh) -> Axes:
    """The facts that a step of `model` shows once it is divided over `mesh`, beside one of the plain model, which is
    taken first. Leaves the model divided."""
    plain, divided, stage = _Sizes(), _Sizes(), "dividing the layers"
    try:
        with plain:
            _forward(program, model)
    except Exception:
        return Axes()  # found by the plain model's own step
    try:
        with divide_by(program, plan, model, mesh)():
            stage = "forward"
            with divided:
                loss = _forward(program, model)
            stage = "backward"
            loss.backward()
    except Exception as error:
        failure = failure_of(error, stage, model)
        return Axes(failure=failure._replace(fix=_SPLIT) if _is_about_shapes(error) else failure)
    return Axes(narrowed=tuple(_narrowed(plain.seen, divided.seen)))


def divide_by(
    program: Program, plan: Parallelism, model: nn.Module, mesh: DeviceMesh
) -> Callable[[], AbstractContextManager[Any]]:
    """Divide `model` as the program, or `plan`, says; where its loss and backward run."""
    found = (program.parallelize or parallelize_by(plan))(model, mesh)
    return found if callable(found) else nullcontext


def _is_about_shapes(error: Exception) -> bool:
    return any(word in str(error) for word in ("shape", "size", "view", "dimension"))


def _forward(program: Program, model: nn.Module) -> Tensor:
    torch.manual_seed(0)
    loss = program.loss(model, program.batch(0))
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


class _Got(Exception):
    """Ends a step when the model has got its inputs."""


def _sequence(program: Program, model: nn.Module) -> int:
    """Tokens of a sequence that the model gets, 0 if its inputs do not say."""
    got: list[Tensor] = []

    def forward(*args: Any, **kwargs: Any) -> None:
        got.extend(tensors_in((args, kwargs)))
        raise _Got

    model.forward = forward
    try:
        program.loss(model, program.batch(0))
    except Exception:
        pass  # what else it raises is found by the plain model's own step
    finally:
        del model.forward
    first = got[0] if got else None
    return int(first.shape[1]) if first is not None and first.ndim == 2 and not first.is_floating_point() else 0


# ---- sizes -----------------------------------------------------------------------------------------------------------


class Use(NamedTuple):
    """A product, a sum or attention: what it is, over how many elements, and where in the program."""

    what: str
    size: int
    place: str


class _Sizes(TorchFunctionMode):
    """Notes over how many elements operations on plain tensors add."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Use] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ADDING and not any(issubclass(kind, DTensor) for kind in types):
            what, size = _ADDING[func]
            try:
                self.seen.append(Use(what, size(*args, **kwargs), _place()))
            except (TypeError, IndexError, AttributeError):
                pass  # a call in another form
        return func(*args, **kwargs)


def _contracted(first: Tensor, second: Tensor, *_: Any, **__: Any) -> int:
    return first.shape[-1]


def _width(query: Tensor, *_: Any, **__: Any) -> int:
    return query.shape[-1]


def _reduced(x: Tensor, dim: Any = None, *_: Any, **__: Any) -> int:
    dims = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    return int(torch.Size(x.shape[each] for each in dims).numel())


def _normalised(x: Tensor, shape: Any, *_: Any, **__: Any) -> int:
    return int(torch.Size(x.shape[-len(shape) :]).numel())


_ADDING: dict[Any, tuple[str, Callable[..., int]]] = {
    F.scaled_dot_product_attention: ("attention over heads", _width),
    **dict.fromkeys(
        (torch.matmul, torch.bmm, torch.mm, Tensor.matmul, Tensor.bmm, Tensor.mm, Tensor.__matmul__),
        ("a matrix product", _contracted),
    ),
    **dict.fromkeys((torch.mean, torch.sum, Tensor.mean, Tensor.sum), ("a sum or mean", _reduced)),
    **dict.fromkeys((torch.var, Tensor.var, torch.softmax, Tensor.softmax, F.softmax), ("a sum or mean", _reduced)),
    **dict.fromkeys((F.layer_norm, F.rms_norm), ("a norm", _normalised)),
}


def _place() -> str:
    """The nearest line outside of torch and of this package."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_USERS):
        frame = frame.f_back
    if frame is None:
        return "an unknown place"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


def _narrowed(plain: list[Use], divided: list[Use]) -> Iterator[str]:
    """Uses that add over fewer elements than in one process. What is inside of a divided layer works on DTensors, and
    is not among them."""
    left = iter(divided)
    said: dict[str, None] = {}
    for use in plain:
        other = next((each for each in left if (each.what, each.place) == (use.what, use.place)), None)
        if other is None:
            return  # ways part: nothing can be compared after it
        if other.size != use.size:
            said.setdefault(f"{use.what} of {other.size}, in one process of {use.size} (at {use.place})")
    yield from said
