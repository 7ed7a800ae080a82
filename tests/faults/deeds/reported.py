"""What the cases of reported programs do."""

from __future__ import annotations

import abc
import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.swa_utils import AveragedModel

import fullshard
from tests.faults.actions import Action
from tests.faults.program import Run
from tests.harness.models import seeded
from tests.threads.programs import WIDTH, Block, Model, adapt

# ---- containers ------------------------------------------------------------------------------------------------------


@dataclass
class State:
    table: Tensor
    seen: int = 0


class Noting(Model):
    """Hands `notes` to each block, which calls `write(index, x, notes)` in it."""

    write: Callable[[int, Tensor, Any], object]

    def forward(self, tokens: Tensor, notes: Any = None) -> Any:  # type: ignore[override]
        x = self.embedding(tokens)
        for index, layer in enumerate(self.layers):
            x = layer(x, notes, index)
            self.after(notes)
        return self.head(x)

    def after(self, notes: Any) -> None:
        """What the model itself does with them after each block."""


def noting(write: Callable[[int, Tensor, Any], object], after: Callable[[Any], object] | None = None) -> Any:
    class Writing(Block):
        def forward(self, x: Tensor, notes: Any, index: int) -> Tensor:  # type: ignore[override]
            write(index, x, notes)
            return super().forward(x)

    body: dict[str, Any] = {"block": Writing}
    if after is not None:
        body["after"] = lambda self, notes: after(notes)
    return type("Noting", (Noting,), body)


def notes_are(make: Callable[[], Any], wanted: Callable[[Any], bool]) -> Callable[[Run, Tensor], Tensor]:
    """A loss that gives new notes to the model, and raises unless all of them arrived."""

    def loss(run: Run, tokens: Tensor) -> Tensor:
        notes = make()
        found: Tensor = run.model(tokens, notes).float().pow(2).mean()
        if not wanted(notes):
            raise AssertionError(f"what blocks wrote is not there: {notes}")
        return found

    return loss


def append(index: int, x: Tensor, notes: Any) -> None:
    notes.append(x.float().mean())


def count(index: int, x: Tensor, notes: Any) -> None:
    notes.seen += 1


def hand_on(index: int, x: Tensor, notes: Any) -> None:
    if index:
        notes[f"kv {index - 1}"]  # a bare KeyError where it was lost
    notes[f"kv {index}"] = x


def edit(index: int, x: Tensor, notes: Any) -> None:
    notes[0] += 1.0


# ---- models ----------------------------------------------------------------------------------------------------------


class Padded(Model):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH, padding_idx=0)


def by_the_guide(run: Run) -> None:
    """`to_empty`, then `reset_parameters` of each module."""
    if run.plain:
        return
    run.model.to_empty(device="cpu")
    torch.manual_seed(run.rank)
    for module in run.model.modules():
        if callable(getattr(module, "reset_parameters", None)):
            module.reset_parameters()


class Named(abc.ABC):
    @abc.abstractmethod
    def title(self) -> str: ...


T = TypeVar("T")


class Sized(Protocol):
    width: int


class OfMixin(Named, Model):
    """Its first base is an abstract mixin, which has a layout of its own."""

    def title(self) -> str:
        return "model"


class OfGeneric(Generic[T], Model):
    """Its first base is generic."""


class OfProtocol(Sized, Model):
    """Its first base is a protocol."""


class Gated(Block):
    """One row: which of two ranks has none."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.sigmoid(self.gate(x))


# ---- calls -----------------------------------------------------------------------------------------------------------


def ddp(name: str) -> Action:
    def action(run: Run) -> None:
        if not run.plain:
            DistributedDataParallel(run.model.get_submodule(name))

    return action


def copied_average(run: Run) -> None:
    AveragedModel(run.model)


def copied_list(run: Run) -> None:
    copy.deepcopy([run.model])


def fresh_zero(run: Run) -> None:
    """This rank's batch has no loss."""
    run.kept["losses"][:] = [torch.zeros((), requires_grad=True)]


def after_forward(run: Run, tokens: Tensor) -> Tensor:
    """A chunked loss, which takes the head's weight instead of calling the head."""
    hidden = run.model.hidden(tokens)
    return F.linear(hidden, run.model.head.weight).pow(2).mean()


def opened(run: Run, tokens: Tensor) -> Tensor:
    if run.plain:
        return after_forward(run, tokens)
    hidden = run.model.hidden(tokens)
    with fullshard.unit_open(run.model.head):
        return F.linear(hidden, run.model.head.weight).pow(2).mean()


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


class Headed(nn.Module):
    """A body that runs, and a head whose weight is read beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Body()
        self.head = nn.Linear(WIDTH, 11, bias=False)

    def hidden(self, tokens: Tensor) -> Tensor:
        return self(tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.body(tokens)
        return found


def torch_clip(run: Run) -> None:
    nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)


def torch_clip_values(run: Run) -> None:
    nn.utils.clip_grad_value_(run.model.parameters(), 1.0, foreach=True)


def adamw(**options: Any) -> Callable[[Run], Any]:
    return lambda run: AdamW(run.model.parameters(), lr=1e-2, **({} if run.plain else options))


def on_shards(run: Run) -> Any:
    optimizer = AdamW(run.model.parameters(), lr=1e-2, foreach=True)
    return optimizer if run.plain else fullshard.step_on_shards(optimizer)


def muon(run: Run) -> Any:
    return torch.optim.Muon([p for p in run.model.parameters() if p.ndim == 2], lr=1e-2)


def other_head(run: Run) -> None:
    """A second model, which nothing shards, trains in the same optimizer."""
    head = run.kept["head"] = seeded(lambda: nn.Linear(11, 2, bias=False))
    run.optimizer.add_param_group({"params": list(head.parameters())})


def into_other_head(run: Run, tokens: Tensor) -> Tensor:
    found: Tensor = run.kept["head"](run.model(tokens)).pow(2).mean()
    return found


def adapted(run: Run) -> None:
    """Adapters beside a base that is frozen, after `fully_shard`."""
    adapt(run.model)


# ---- numbers of gradients --------------------------------------------------------------------------------------------


def own_loop(may_step: Callable[[Run], bool]) -> Callable[[Run], None]:
    """A loop that looks at gradients before each update, and leaves out the update that it does not like."""

    def program(run: Run) -> None:
        run.build()
        for step in range(run.setup.steps):
            run.step = step
            run.at("step")
            run.forward_and_backward()
            if may_step(run):
                run.optimizer.step()
            run.optimizer.zero_grad()

    return program


def no_nan_here(run: Run) -> bool:
    """Of a DTensor: none in this rank's rows."""
    return not any(int(torch.isnan(p.grad).sum()) for p in run.model.parameters())


def clipped_by_figures(run: Run) -> bool:
    """Each gradient to a norm of 0.01; steps with a NaN are left out, on all ranks."""
    if run.ours:
        stats = fullshard.grad_stats(run.model)
        norms = {name: figures.norm for name, figures in stats.parameters.items()}
        bad = stats.model.nonfinite > 0
    else:
        norms = {name: float(p.grad.norm()) for name, p in run.model.named_parameters()}
        bad = not all(map(math.isfinite, norms.values()))
    if not bad:
        for name, p in run.model.named_parameters():
            p.grad.mul_(0.01 / norms[name])
    return not bad
