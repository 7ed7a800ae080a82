"""Programs for `fullshard verify`, faults of one parameter's gradients, and its parts run on the pool."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fullshard.program import Program, find_program
from fullshard.verify.comparison import Difference, Result
from fullshard.verify.exercised import FullComparison
from fullshard.verify.experiments import Experiments
from fullshard.verify.processes import train, train_elsewhere
from fullshard.verify.setting import EXERCISES, Setting
from fullshard.verify.strategy import Strategy, parse_strategy
from tests.harness.errors import RanksFailed
from tests.harness.installed import clear_sharding_cache
from tests.harness.planted_faults import EXERCISED, Planted, planted
from tests.harness.pool import pool
from tests.harness.seeded_faults import RECEIVE, REDUCED, SENT_FRESH, TAKE, SeededFault, seeded

ENTRY = "tests.harness.verified:program"


class Counted(nn.Module):
    """A norm, and a running mean of what it saw: a buffer that each rank updates from its own batches."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.float().mean((0, 1)), 0.1)
        return self.norm(x)  # type: ignore[no-any-return]


class Net(nn.Module):
    """A tied embedding, dropout, a buffer, uneven and even rows, a frozen weight."""

    def __init__(self, dropout: float = 0.1, hidden: int = 33) -> None:
        super().__init__()
        self.embedding = nn.Embedding(38, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, 16))
            for _ in range(2)
        )
        self.norm = Counted(16)
        self.head = nn.Linear(16, 38, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks[0][0].bias.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def batch(index: int) -> Tensor:
    return torch.randint(0, 38, (4, 9), generator=torch.Generator().manual_seed(index))


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def program() -> Program:
    return Program(Net, loss, batch)


def split() -> Program:
    """With tensor parallelism of the blocks, whose columns have to be even. Without dropout, which each rank draws for
    its columns."""

    def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
        parallelize_module(model, mesh, {"blocks.*.0": ColwiseParallel(), "blocks.*.3": RowwiseParallel()})

    return Program(lambda: Net(0.0, 32), loss, batch, parallelize=parallelize)


def cut() -> Program:
    """Matrices are cut along their second dim."""

    def shard(model: nn.Module, fully_shard: Callable[..., Any]) -> None:
        for module in (*model.blocks, model):
            fully_shard(module, shard_placement_fn=lambda p: Shard(1) if p.ndim > 1 else None)

    return Program(Net, loss, batch, shard=shard)


class Aliased(Counted):
    """Updates its buffer through another reference to it."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.seen = [self.mean]

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen[0].lerp_(x.float().mean((0, 1)), 0.1)
        return self.norm(x)  # type: ignore[no-any-return]


def aliased() -> Program:
    """A buffer that the model updates through a list."""

    def build() -> nn.Module:
        model = Net()
        model.norm = Aliased(16)
        return model

    return Program(build, loss, batch)


class ByNorm(torch.optim.SGD):
    """Divides its step by the norm of each gradient, which it takes as a number: of a shard, that of its rows."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / (1.0 + float(p.grad.norm())))


def by_norm() -> Program:
    """An optimizer that reads parts of sums."""
    return Program(Net, loss, batch, optimizer=lambda parameters: ByNorm(parameters, lr=0.1))


class Waves(nn.Module):
    """Features of times, of any length: in bfloat16 a time of 3000 is known to the next 16, so a cast changes them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, width)
        self.register_buffer("rates", 2.0 ** -torch.arange(width))

    def forward(self, times: Tensor) -> Tensor:
        waves = torch.sin(times.float()[..., None] * self.rates)
        return self.project(waves.to(self.project.weight.dtype))  # type: ignore[no-any-return]


class Timed(nn.Module):
    """A block that hands times in float32 to a unit of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.waves = Waves(width)
        self.mix = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        times = 3000 + 1.3 * torch.arange(x.shape[1], dtype=torch.float32)
        return x + self.mix(nn.functional.gelu(x)) + self.waves(times)  # type: ignore[no-any-return]


def timed() -> Program:
    """Blocks with a unit inside, which casts its own inputs, again where the block is computed again."""

    def build() -> nn.Module:
        model = Net(0.0)
        model.blocks = nn.ModuleList(Timed(16) for _ in range(2))
        return model

    def shard(model: Any, fully_shard: Callable[..., Any]) -> None:
        for block in model.blocks:
            fully_shard(block.waves)
            fully_shard(block)
        fully_shard(model)

    return Program(build, loss, batch, shard=shard)


def together() -> Program:
    """The embedding, the norm and the head are one unit."""

    def shard(model: Any, fully_shard: Callable[..., Any]) -> None:
        for block in model.blocks:
            fully_shard(block)
        fully_shard([model.embedding, model.norm, model.head])
        fully_shard(model)

    return Program(Net, loss, batch, shard=shard)


class TwoOutputs(Net):
    """The hidden state beside the logits, as models of transformers return it."""

    def forward(self, tokens: Tensor) -> Any:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x)), x


def two_outputs() -> Program:
    """Of two outputs the loss uses both."""

    def both(model: nn.Module, tokens: Tensor) -> Tensor:
        logits, hidden = model(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) + hidden.pow(2).mean()

    return Program(TwoOutputs, both, batch)


class Normed(nn.Module):
    """A block with BatchNorm, whose statistics a forward updates."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.norm = nn.BatchNorm1d(2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.norm(self.up(x).mT).mT))  # type: ignore[no-any-return]


def batch_norms() -> Program:
    """Buffers that blocks update, and update again where they are computed again."""

    def build() -> nn.Module:
        model = Net()
        model.blocks = nn.ModuleList(Normed(16) for _ in range(2))
        return model

    return Program(build, loss, batch)


def drawing() -> Program:
    """The loss depends on numbers of Python's and numpy's generators."""
    import numpy

    def noisy(model: nn.Module, tokens: Tensor) -> Tensor:
        return loss(model, tokens) * (1 + random.random() + float(numpy.random.rand()))

    return Program(Net, noisy, batch)


def overflowing() -> Program:
    """In float16 the scaled gradients of batches 0 and 1, the first step of two ranks, are infinite."""

    def large(model: nn.Module, numbered: tuple[int, Tensor]) -> Tensor:
        index, tokens = numbered
        return loss(model, tokens) * (4096.0 if index < 2 else 1.0)

    return Program(Net, large, lambda index: (index, batch(index)))


# ---- one parameter's gradients ---------------------------------------------------------------------------------------


class GradientFault(NamedTuple):
    """What goes wrong with the gradients of the parameter `name`."""

    kind: str
    name: str


def _rows_rolled(part: Tensor) -> Tensor:
    return part.roll(1, 0)


def _one_element(part: Tensor) -> Tensor:
    part = part.clone()
    if part.numel():
        part.view(-1)[part.numel() // 2] += part.abs().max() / 100
    return part


# What becomes of this rank's rows of the result, where it has rows.
RESULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "doubled": lambda part: part * 2,
    "halved": lambda part: part / 2,
    "zero": torch.zeros_like,
    "negative": torch.neg,
    "rows in another place": _rows_rolled,
    "one element": _one_element,
    "a percent too large": lambda part: part * 1.01,
    "rounded to bfloat16": lambda part: part.bfloat16().to(part.dtype),
}
# What becomes of what rank 1 sends.
SENT: dict[str, Callable[[Tensor], Tensor]] = {
    "rank 1 sends zeros": torch.zeros_like,
    "rank 1 sends twice as much": lambda gradient: gradient * 2,
    "rank 1 sends the negative": torch.neg,
    "rank 1 sends other rows": _rows_rolled,
}
TRAINABLE = [name for name, parameter in Net().named_parameters() if parameter.requires_grad]
GRADIENT_FAULTS = [GradientFault(kind, name) for kind in (*RESULTS, *SENT) for name in TRAINABLE]
_HERE = "__import__('tests.harness.verified', fromlist=['verified'])"
# The fault of this process.
_fault: list[GradientFault] = []


def of_result(part: Tensor, param: Any) -> Tensor:
    """Called with each result in a training that is faulty."""
    (fault,) = _fault
    return RESULTS[fault.kind](part) if fault.kind in RESULTS and param.owner.name == fault.name else part


def of_sent(gradient: Tensor, param: Any) -> Tensor:
    """Called with each gradient before it is sent in a training that is faulty."""
    (fault,) = _fault
    is_it = gradient is not None and fault.kind in SENT and param.owner.name == fault.name
    return SENT[fault.kind](gradient) if is_it and torch.distributed.get_rank() == 1 else gradient


def _record_gradient_fault(rank: int, setting: Setting, folder: str, fault: GradientFault) -> None:
    _fault[:] = [fault]
    result = SeededFault(RECEIVE, REDUCED, f"gradients.reduced = {_HERE}.of_result(part, self.params[i]) if")
    sent = SeededFault(TAKE, SENT_FRESH, f"else {_HERE}.of_sent(gradients.fresh, self.params[i]))")
    with seeded(result), seeded(sent):
        _record(rank, setting, folder, None)


def record_gradient_fault(folder: Path, fault: GradientFault, strategy: str = "zero3", world: int = 2) -> Setting:
    """Train on the pool with `fault`."""
    setting = Setting(ENTRY, "fullshard", parse_strategy(strategy), world, 1, "cpu")
    pool(world).run(_record_gradient_fault, setting, str(folder), fault)
    return setting


def _record(rank: int, setting: Setting, folder: str, fault: SeededFault | Planted | None) -> None:
    # Each rank's own statistics are compared; that nothing averages them is not the question here.
    warnings.filterwarnings("ignore", "buffers differ between ranks")
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    # DTensor keeps meshes of earlier jobs in this process, whose groups are gone, and takes them for equal ones.
    clear_sharding_cache()
    inside = nullcontext() if fault is None else planted(fault) if isinstance(fault, Planted) else seeded(fault)
    with inside:
        train(find_program(setting.entry), setting, torch.device("cpu"), Path(folder))


def record(folder: Path, strategy: str, world: int = 2, fault: SeededFault | None = None, **options: Any) -> Setting:
    """Train on the pool and write the records to `folder`."""
    entry, library = options.get("entry", ENTRY), options.get("library", "fullshard")
    steps, exercises = options.get("steps", 2), options.get("exercises", ())
    setting = Setting(entry, library, parse_strategy(strategy), world, steps, "cpu", exercises)
    pool(world).run(_record, setting, str(folder), fault)
    if "another world" in setting.exercises:
        pool(world + 1).run(_record_elsewhere, setting, str(folder), fault)
    return setting


def _record_elsewhere(rank: int, setting: Setting, folder: str, fault: SeededFault | None) -> None:
    setting = setting._replace(world=setting.world + 1, strategy=Strategy(), steps=0)
    clear_sharding_cache()
    with seeded(fault) if fault is not None else nullcontext():
        train_elsewhere(find_program(setting.entry), setting, torch.device("cpu"), Path(folder))


def record_planted(folder: Path, fault: Planted) -> Setting:
    """Train on the pool with `fault`."""
    entry = f"tests.harness.verified:{fault.program}"
    exercises = tuple(name for name in EXERCISES if name != "another world") if fault.place in EXERCISED else ()
    setting = Setting(entry, "fullshard", parse_strategy(fault.strategy), fault.world, fault.steps, "cpu", exercises)
    pool(fault.world).run(_record, setting, str(folder), fault)
    return setting


def explain(result: Result, fault: SeededFault | Planted | None = None) -> Difference | None:
    """The difference of `result`, with the cause that experiments on the pool find."""

    def train(jobs: dict[Setting, Path]) -> dict[Setting, str]:
        failures = {}
        for setting, folder in jobs.items():
            try:
                pool(setting.world).run(_record, setting, str(folder), fault)
            except RanksFailed as error:
                failures[setting] = str(error)
        return failures

    if result.difference is None:
        return None
    program = find_program(result.setting.entry)
    return Experiments(program, result.setting, torch.device("cpu"), train).explained(result.difference)


def compare(folder: Path, setting: Setting) -> Result:
    """Compare the records in `folder`."""
    return FullComparison(find_program(setting.entry), setting, folder, torch.device("cpu")).run()
