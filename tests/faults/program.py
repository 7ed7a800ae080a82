"""The training that faults disturb, for fullshard, for torch's FSDP2, and plain on one process.

Moments of it, at which a fault may strike (`event`): start, built, wrapped, ready (the optimizer is there), all at step
-1; in each step: step, batch, loss (after forward), gradients (after backward), updated (after `optimizer.step()`),
cleared; end; over (the state was taken). Places in modules, by dotted name ("" is the root): "before M" and "after M"
in forward, "backward M" when the gradient of its output comes, "again M" in a second forward of a step, as
recomputation is one. With several micro-batches "#1" after any of them means the second one.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import fullshard
from tests.faults.cases import Case, Setup
from tests.faults.ranks import Caught, Told
from tests.harness.faults import Faults
from tests.harness.implementations import FULLSHARD, Implementation
from tests.harness.models import seeded
from tests.threads.programs import batch, part

_IN_MODULES = re.compile(r"^(before|after|backward|again) ?([^#]*?)( #\d+)?$")


class Run:
    """One rank of a run. `impl` is None for plain training, which takes all ranks' batches on one process."""

    def __init__(self, rank: int, setup: Setup, impl: Implementation | None, faults: Faults, told: Told | None) -> None:
        self.rank, self.setup, self.impl, self.faults, self.told = rank, setup, impl, faults, told
        self.step = -1
        self.micro = 0
        self.model: Any = None
        self.optimizer: Any = None
        self.scaler: Any = None
        self.schedule: Any = None
        self.clip_arguments: dict[str, Any] = {"max_norm": 0.05, "error_if_nonfinite": True}
        self.handles: list[Any] = []
        self.kept: dict[str, Any] = {}  # for actions that work together
        self.outputs: list[Tensor] = []  # what `look` saw; compared like parameters

    @property
    def ours(self) -> bool:
        return self.impl is FULLSHARD

    @property
    def plain(self) -> bool:
        return self.impl is None

    def at(self, event: str) -> None:
        """This moment has come: let the faults that are waiting for it strike."""
        for name in (event, f"{event} #{self.micro}"):
            while self.faults.check(rank=self.rank, step=self.step, event=name, context=self):
                pass

    # ---- the parts of a program ------------------------------------------------------------------------------

    def build(self) -> None:
        """The model, sharded, and its optimizer; the same initial values on every rank."""
        self.at("start")
        if self.model is None:
            self.model = seeded(self.setup.model)
        if self.setup.recompute:
            for layer in self.model.layers:
                _recompute(layer)
        self.at("built")
        self.shard()
        self.at("wrapped")
        if self.optimizer is None:
            make = self.setup.optimizer
            self.optimizer = make(self) if make else torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        if self.setup.schedule is not None:
            self.schedule = self.setup.schedule(self.optimizer)
        if self.setup.scaler:
            self.scaler = self.new_scaler()
        self.at("ready")

    def new_scaler(self, **options: Any) -> Any:
        kind = fullshard.GradScaler if self.ours else torch.amp.GradScaler
        return kind("cpu", **{"init_scale": 64.0, **options})

    def shard(self, **more: Any) -> None:
        if self.impl is None:
            return
        units = self.setup.units
        if units is None:
            units = tuple(f"layers.{i}" for i in range(len(getattr(self.model, "layers", ()))))
        options = {**(self.setup.options(self.impl) if self.setup.options else {}), **more}
        if self.setup.ignored:
            options["ignored_params"] = {self.model.get_parameter(name) for name in self.setup.ignored}
        how = replicator(self.impl) if self.setup.how == "replicate" else self.impl.fully_shard
        for name in units:
            how(self.model.get_submodule(name), **options)
        how(self.model.get_submodule(self.setup.root), **options)

    def batches(self, step: int | None = None) -> list[Tensor]:
        """The tokens of this rank in a step's running micro-batch; of all ranks for plain training."""
        world, number = self.setup.world, (self.step if step is None else step) + 100 * self.micro
        tokens = batch(world, number)
        return [part(tokens, rank) for rank in (range(world) if self.plain else (self.rank,))]

    def loss(self, tokens: Tensor) -> Tensor:
        if self.setup.loss is not None:
            return self.setup.loss(self, tokens)
        found: Tensor = self.model(tokens).pow(2).mean()
        return found

    def evaluate(self, count: int = 1) -> None:
        """Forwards without gradients, of batches that no step has."""
        with torch.no_grad():
            for number in range(count):
                for tokens in self.batches(step=50 + number):
                    self.loss(tokens)

    def look(self) -> None:
        """Keep the output of an evaluation of one batch, the same for all ranks: it is compared, too."""
        with torch.no_grad():
            self.outputs.append(self.model(batch(self.setup.world, 60)).clone())

    def forward_and_backward(self) -> None:
        self.at("batch")
        losses = self.kept["losses"] = [self.loss(tokens) for tokens in self.batches()]
        self.at("loss")
        for loss in self.kept["losses"]:
            loss = loss / (len(losses) * self.setup.micros)
            (self.scaler.scale(loss) if self.scaler else loss).backward()
        if self.setup.averaged and not self.plain:
            for p in self.model.parameters():
                if not isinstance(p, DTensor) and p.grad is not None:
                    dist.all_reduce(p.grad.div_(self.setup.world))
        self.at("gradients")

    def one_step(self) -> None:
        self.micro = 0
        self.at("step")
        hold = self.setup.hold and not self.plain
        with self._guard_of_step():
            for micro in range(self.setup.micros):
                self.micro = micro
                if hold:
                    self.model.set_requires_gradient_sync(micro == self.setup.micros - 1)
                with self._places(), self._guard():
                    self.forward_and_backward()
            self.update()
        if self.schedule is not None:
            self.schedule.step()
        self.at("updated")
        self.optimizer.zero_grad()
        self.at("cleared")

    def update(self) -> None:
        if self._may_update():
            self.optimizer.step() if self.scaler is None else self.scaler.step(self.optimizer)
        if self.scaler is not None:
            self.scaler.update()

    def clip(self) -> None:
        clip = nn.utils.clip_grad_norm_ if self.impl is None else self.impl.clip
        clip(self.model.parameters(), **self.clip_arguments)

    def _guard(self) -> contextlib.AbstractContextManager[Any]:
        return fullshard.guard(self.model) if self.setup.guard is True and self.ours else contextlib.nullcontext()

    def _guard_of_step(self) -> contextlib.AbstractContextManager[Any]:
        if self.setup.guard == "step" and self.ours:
            return fullshard.guard(self.model, self.optimizer)
        return contextlib.nullcontext()

    def _may_update(self) -> bool:
        if self.setup.clip:
            self.clip()
        if self.setup.finite and self.ours:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            found = fullshard.check_gradients(self.model, loss=self.kept["losses"][-1], on_nonfinite=self.setup.finite)
            return bool(found.ok)
        if self.setup.finite and self.impl is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), float("inf"), error_if_nonfinite=True)
        return True

    @contextlib.contextmanager
    def _places(self) -> Iterator[None]:
        """Hooks where faults of this step wait inside of modules, until its forward and backward are over."""
        handles = []
        for fault in self.faults.pending:
            found = _IN_MODULES.match(fault.event)
            if fault.step == self.step and fault.rank in (None, self.rank) and found:
                handles += self._hook(found[1], found[2])
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, place: str, name: str) -> list[Any]:
        module = self.model.get_submodule(name)
        event = f"{place} {name}"
        calls = 0

        def again(*_: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == 2:
                self.at(event)

        def backward(_module: nn.Module, _args: Any, output: Any) -> Any:
            return _In.apply(output, lambda: self.at(event))

        if place == "before":
            return [module.register_forward_pre_hook(lambda *_: self.at(event))]
        if place == "after":
            return [module.register_forward_hook(lambda *_: self.at(event))]
        if place == "again":
            return [module.register_forward_pre_hook(again)]
        return [module.register_forward_hook(backward)]

    def state(self) -> dict[str, Tensor]:
        """Full parameters, buffers and optimizer state, by name; every rank calls it."""
        found: dict[str, Tensor] = {}
        for name, p in self.model.named_parameters():
            found[name] = _full(p)
            for key, value in self.optimizer.state.get(p, {}).items():
                found[f"{name}:{key}"] = _full(value)
        for name, buffer in self.model.named_buffers():
            found[f"{name} (buffer)"] = _full(buffer)
        found.update({f"output {number}": output for number, output in enumerate(self.outputs)})
        return found


class _In(torch.autograd.Function):
    """Identity that calls `then` in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, then: Callable[[], None]) -> Tensor:
        ctx.then = then
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.then()
        return gradient, None


def replicator(impl: Implementation) -> Callable[..., Any]:
    """The `replicate` of this implementation."""
    if impl is FULLSHARD:
        return fullshard.replicate
    from torch.distributed._composable.replicate_with_fsdp import replicate

    return replicate


def _full(value: Any) -> Tensor:
    full = value.full_tensor() if isinstance(value, DTensor) else torch.as_tensor(value)
    return full.detach().clone()


def _recompute(layer: Any) -> None:
    forward = layer.forward
    layer.forward = lambda *args: checkpoint(forward, *args, use_reentrant=False)


def train(run: Run) -> None:
    """Build, and train `steps` steps; with `catches`, a step that raised is tried again."""
    run.build()
    steps(run)


def steps(run: Run) -> None:
    """The steps of `train`, for programs that build in their own way."""
    caught = 0
    run.step = 0
    while run.step < run.setup.steps:
        try:
            run.one_step()
        except BaseException as error:
            if caught >= run.setup.catches:
                raise
            caught += 1
            assert run.told is not None
            run.told.caught.append(Caught.of(error))
            del error
            if not run.setup.keeps:
                run.optimizer.zero_grad()
            continue
        run.step += 1
    run.at("end")


def rank_main(case: Case, impl: Implementation | None, *, faults: bool) -> Callable[[int, Told], None]:
    """What a rank of the case runs. `faults`: those of the case; for plain training only its deeds on all ranks."""
    chosen = [f for f in case.faults if impl is not None or (f.kind == "do" and f.rank is None)] if faults else []

    def main(rank: int, told: Told) -> None:
        torch.use_deterministic_algorithms(True)
        own = Faults(*chosen)
        own.listener = lambda _, fault: told.struck(next(i for i, f in enumerate(case.faults) if f is fault))
        run = Run(rank, case.setup, impl, own, told)
        (case.program or train)(run)
        told.state = run.state()
        run.at("over")

    return main
