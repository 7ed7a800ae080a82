"""The steps of a run on each rank.

```
windows of the step (same list on all ranks) -> this rank's slice -> micro-batches: forward, backward
   -> NaN or inf on some rank? -> clip by the global norm -> the loss of the whole batch -> optimizer
   -> every eval_every steps: validation
```

The mathematics does not depend on the number of ranks: the global batch is fixed, each token's loss has the weight
1 / (tokens of the global batch), and reported figures are summed over all ranks.
"""

from __future__ import annotations

import math
import signal
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

import fullshard
from fullshard import balance_loss, checkpoint
from fullshard.observe import Recorder, Report
from fullshard.train.config import AUTO, Config
from fullshard.train.console import Console
from fullshard.train.data import SampleOrder, Tokenizer, TokenSplit, TrainingPart, validation_windows, windows
from fullshard.train.folder import Checkpoints
from fullshard.train.metrics import MetricsFile, StepRecord, TensorBoard, memory_nbytes, peak_flop_per_second
from fullshard.train.model import as_fsdp, compute_dtype
from fullshard.train.optimizers import parts_of
from fullshard.train.pipeline import Pipeline, Stages
from fullshard.train.pretrained import flop_of, logits_of, numel_of, without_dropout
from fullshard.train.process import Stopped, World, stop_requested
from fullshard.train.schedules import learning_rate


class Loss(NamedTuple):
    """A loss over some text: the sum, with the numbers of tokens and bytes.

    >>> round(Loss(math.log(256) * 10, 10, 10).bits_per_byte, 9)
    8.0
    """

    nats: float
    tokens: int
    nbytes: int

    @property
    def per_token(self) -> float:
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        return perplexity_of(self.per_token)

    @property
    def bits_per_byte(self) -> float:
        return self.nats / self.nbytes / math.log(2) if self.nbytes else 0.0


def perplexity_of(nats: float) -> float:
    """e to the power of a loss per token; infinity where that is too large.

    >>> round(perplexity_of(math.log(50)), 9), perplexity_of(1e4)
    (50.0, inf)
    """
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf


class Outcome(NamedTuple):
    """The result of the loop."""

    last: StepRecord | None  # None if no step was left to run
    seconds: float
    held: Report  # parameters, gradients and optimizer of this rank, counted after the first step's update


@dataclass(slots=True)
class Outputs:
    """The destinations of a step's figures. Only rank 0 has files."""

    console: Console
    metrics: MetricsFile | None = None
    tensorboard: TensorBoard | None = None
    recorder: Recorder | None = None  # of every rank

    def step(self, record: StepRecord) -> None:
        for file in (self.metrics, self.tensorboard):
            if file is not None:
                file.write(record)
        self.console.step(record)
        if record.nonfinite is not None:
            self.console.say(f"step {record.step}: {record.nonfinite}")
        if record.drift is not None:
            differ = f"ranks differ; the checkpoint has the values of one of them: {record.drift}"
            self.console.say(f"step {record.step}: {differ}")

    def close(self) -> None:
        self.console.end()
        for file in (self.tensorboard, self.metrics, self.recorder):
            if file is not None:
                file.close()


class Trainer:
    """Model, optimizer and data of one rank, and the work of a step."""

    def __init__(
        self,
        config: Config,
        world: World,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        split: TokenSplit,
        tokenizer: Tokenizer,
        stages: Stages | None = None,
    ) -> None:
        self.config, self.world, self.model, self.optimizer = config, world, model, optimizer
        keys = config.training
        self.stages = stages
        if stages is not None:
            stages.begin(self._summed)
        self.micro: fullshard.MicroBatches | None = None
        if stages is None:
            self.micro = fullshard.MicroBatches(
                model,
                size=config.micro_batch(world.size),
                search="halve" if keys.micro_batch == AUTO else "fixed",
                reduce="last" if keys.accumulate == "local" else "each",
            )
        if keys.check_every:
            fullshard.check_invariants(model, every=keys.check_every)
        self.part = TrainingPart(split.train, split.train_counted, keys.global_batch * keys.sequence_length)
        self.order = SampleOrder(num_tokens=len(split.train), sequence_length=keys.sequence_length, seed=keys.seed)
        self.validation = validation_windows(
            split.validation, keys.sequence_length, config.metrics.eval_windows, tokenizer.pad, split.validation_counted
        )
        self.pad = tokenizer.pad
        self.token_nbytes = torch.tensor(tokenizer.token_nbytes())
        self.peak_flop_per_second = peak_flop_per_second(world.device, compute_dtype(config.sharding.precision))
        # The random numbers of a step depend on (seed, step, rank): the same with and without a stop.
        # Ranks along tp compute the same with the same tokens.
        alike = world.rank if world.axes is None else world.axes.group(world.rank, "tp")[0]
        self.random = checkpoint.RandomState(keys.seed, alike)
        self.held: Report | None = None
        self.stopped_by = 0  # the signal that some rank received before the last step's figures were summed

    @property
    def share(self) -> int:
        """Sequences of a step of this process."""
        return self.config.training.global_batch // self.world.shares

    @property
    def micro_batch(self) -> int:
        """Sequences in one forward pass of this process."""
        size = None if self.micro is None else self.micro.size
        return size or self.config.micro_batch(self.world.size)

    @property
    def sharded(self) -> nn.Module:
        """The module with all units: the model, or the stages of it that this process has."""
        return self.model if self.stages is None else self.stages.together

    @property
    def pipeline(self) -> Pipeline | None:
        return None if self.stages is None else self.stages.pipeline

    @property
    def numel(self) -> int:
        """The elements of the whole model."""
        return numel_of(self.model) if self.stages is None else self.stages.numel

    @cached_property
    def flop_per_token(self) -> float:
        """Floating-point operations per trained token."""
        return flop_of(self.model, self.numel, self.config.training.sequence_length)

    @property
    def weight(self) -> float:
        """The factor of a token's loss. The reduction averages over shares, so each weighs its tokens by their number:
        the result is the mean over the tokens of the global batch that count, exact for powers of two."""
        return self.world.averaged / self.part.of_step

    def run(self, outputs: Outputs, checkpoints: Checkpoints | None = None, *, after: int = 0) -> Outcome:
        """All steps after step `after`, with checkpoints between them.

        Raises `FloatingPointError`, before the update, if loss or gradient is not finite (`training.nonfinite`);
        `ReplayError` if a replayed step differs (`training.replay_every`); `CheckpointError` before the next step if a
        save in the background failed; and `Stopped` if a rank received SIGTERM: after a step, the same one on all
        ranks, with its checkpoint saved.
        """
        begun = time.monotonic()
        steps, every = self.config.training.steps, self.config.training.replay_every
        outputs.console.begin(steps, after)
        record, waited = None, None
        for step in range(after + 1, steps + 1):
            if checkpoints is not None and checkpoints.failed_somewhere:
                checkpoints.settle()
            if every and step % every == 0:
                record = self.replayed(step, checkpoints)
            else:
                record = self.step(step, outputs.recorder, checkpoints)
            record, waited = replace(record, checkpoint_seconds=waited), None
            if checkpoints is None or not (self.stopped_by or checkpoints.due(step, steps)):
                outputs.step(record)
                continue
            outputs.step(replace(record, drift=self._drift()))
            saving = time.monotonic()
            checkpoints.save(step, wait=bool(self.stopped_by) or step == steps, metrics=record.metrics())
            waited = time.monotonic() - saving
            if outputs.recorder is not None:
                outputs.recorder.note("checkpoint", f"step-{step}", seconds=waited)
            if self.stopped_by:
                raise Stopped(self.stopped_by, step)
        return Outcome(record, time.monotonic() - begun, self.held or fullshard.report(self.sharded, self.optimizer))

    def _drift(self) -> str | None:
        """Replica divergence, checked before one rank's values go into a checkpoint. Collective."""
        return "; ".join(f"{drift.kind} {drift}" for drift in fullshard.find_drift(self.sharded)) or None

    def replayed(self, step: int, checkpoints: Checkpoints | None = None) -> StepRecord:
        """The step, run twice from the same state. Raises `ReplayError` if they differ in a bit, on any rank."""
        records: list[StepRecord] = []

        def once() -> None:
            records.append(self.step(step, None, checkpoints))

        found = fullshard.replay(once, self.model, parts_of(self.optimizer), on_difference="return")
        first, second = records
        # If the second run had less memory, its smaller micro-batches are added in another order.
        if not found.ok and first.micro_batch == second.micro_batch:
            raise fullshard.extras.ReplayError(found)
        return second

    def step(self, step: int, recorder: Recorder | None = None, checkpoints: Checkpoints | None = None) -> StepRecord:
        """One optimizer step, and validation if it is due. `recorder`: records the first. `checkpoints`: learn whether
        one of their saves in the background has failed on some rank."""
        if recorder is not None:
            recorder.begin(step)
        begun = time.monotonic()
        keys = self.config.training
        self.random.begin(step)
        lr = learning_rate(self.config.optimizer, keys.steps, step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        starts = self.order.starts(step - 1, keys.global_batch)
        if self.part.counted is not None:
            # Every process has all tokens, so it counts those of the others without a message.
            places = [self.part.counted[s + 1 : s + keys.sequence_length + 1] for s in starts]
            self.part.of_step = max(int(torch.stack(places).sum()), 1)
        nats, nbytes = self._backward(starts)
        # Before clipping, which would spread one NaN over all gradients.
        # The stages of a pipeline have no mesh in common.
        everyone = None if self.pipeline is None else dist.group.WORLD
        check = fullshard.check_gradients(self.sharded, nats, on_nonfinite="count", process_group=everyone)
        norm = float(fullshard.clip_grad_norm_(self.model.parameters(), keys.clip_norm or math.inf))
        # A stop request of any rank travels with the figures, so that all stop after the same step; so does the failure
        # of a save in the background.
        failed = checkpoints is not None and checkpoints.failed
        figures = [*self.world.counted([nats, nbytes]), float(stop_requested() != 0), float(failed)]
        nats, nbytes, signals, failures = self.world.total(figures)
        self.stopped_by = signal.SIGTERM if signals else 0
        if checkpoints is not None:
            checkpoints.failed_somewhere = bool(failures)
        tokens = keys.global_batch * keys.sequence_length
        loss = Loss(nats, self.part.of_step, round(nbytes))
        # The norm of finite gradients may overflow.
        finite = check.ok and math.isfinite(norm)
        nonfinite = None if finite else f"loss is {loss.per_token}, gradient norm is {norm}; {check}"
        if nonfinite is not None and keys.nonfinite == "raise":
            raise FloatingPointError(
                f"step {step}: {nonfinite}. Nothing was updated. A lower optimizer.lr or a longer "
                f'optimizer.warmup_steps may help; training.nonfinite = "skip" skips such steps'
            )
        if finite or keys.nonfinite == "count":
            self.optimizer.step()
            if self.held is None:
                self.held = fullshard.report(self.sharded, self.optimizer)
        self.optimizer.zero_grad()
        seconds = time.monotonic() - begun
        if recorder is not None:
            recorder.end(loss=loss.per_token, norm=norm, lr=lr)
        val = self.validate() if self._validates(step) else None
        flop_per_second, peak = tokens * self.flop_per_token / seconds, self.peak_flop_per_second
        return StepRecord(
            step=step,
            loss=loss.per_token,
            bits_per_byte=loss.bits_per_byte,
            grad_norm=norm,
            lr=lr,
            tokens=step * tokens,
            seconds=seconds,
            tokens_per_second=tokens / seconds,
            tflop_per_second=flop_per_second / 1e12,
            mfu=flop_per_second / (peak * self.world.size) if peak else None,
            memory_bytes=memory_nbytes(self.world.device),
            micro_batch=self.micro_batch,
            samples=self.order.digest(step - 1, keys.global_batch),
            val_loss=val.per_token if val else None,
            val_bits_per_byte=val.bits_per_byte if val else None,
            perplexity=loss.perplexity,
            val_perplexity=val.perplexity if val else None,
            nonfinite=nonfinite,
        )

    def _validates(self, step: int) -> bool:
        keys, every = self.config.checkpoint, self.config.checkpoint.every
        # The best checkpoints are chosen among those with the metric.
        measured = keys.keep_best and keys.metric.startswith("val_") and every and step % every == 0
        return bool(measured) or step % self.config.metrics.eval_every == 0 or step == self.config.training.steps

    def _backward(self, starts: list[int]) -> tuple[float, float]:
        """Gradients of this rank's share of the windows; returns its summed loss in nats, and its bytes of text."""
        own = starts[self.world.share * self.share : (self.world.share + 1) * self.share]
        inputs, targets = windows(
            self.part.tokens, own, self.config.training.sequence_length, self.part.counted, self.pad
        )
        weight = self.weight
        if self.pipeline is not None:
            device = self.world.device
            loss = self.pipeline.step(inputs.to(device), target=targets.to(device))
            return float(loss) / weight, self._nbytes(self._parts(inputs, targets)[1])
        assert self.micro is not None

        def loss_of(piece: slice) -> tuple[Tensor, tuple[float, float]]:
            parts = self._parts(inputs[piece], targets[piece])
            losses = self._losses(*parts)
            balance = balance_loss(self.model) * (piece.stop - piece.start) / self.share
            return losses.sum() * weight + balance, (float(losses.detach().double().sum()), self._nbytes(parts[1]))

        loss_context = loss_parallel() if self.config.sharding.parallelism.enable_loss_parallel else nullcontext()
        with loss_context, self.world.sequences or nullcontext():
            found = [figures for _, figures in self.micro.backward(loss_of, self.share)]
        return sum(nats for nats, _ in found), sum(nbytes for _, nbytes in found)

    def _parts(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The part of some sequences that this process computes: its tokens, their targets and positions."""
        cp = self.world.sequences
        if cp is None:
            return inputs, targets, None
        inputs, targets = cp.split((inputs, targets))
        return inputs, targets, cp.positions(self.config.training.sequence_length, self.world.device)

    def _nbytes(self, targets: Tensor) -> float:
        return float(self.token_nbytes[targets[targets != self.pad]].sum())

    def _losses(self, inputs: Tensor, targets: Tensor, positions: Tensor | None = None) -> Tensor:
        """Cross entropy of each token in nats, (B*T,) float32; 0 where the target is padding."""
        inputs = inputs.to(self.world.device)
        return self._losses_of(logits_of(self.model, inputs, positions), targets)

    def _summed(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The weighed loss of a micro-batch of a pipeline."""
        return self._losses_of(logits, targets).sum() * self.weight

    def _losses_of(self, logits: Tensor, targets: Tensor) -> Tensor:
        if isinstance(logits, DTensor) and not torch.is_grad_enabled():
            logits = logits.full_tensor()
        flat = targets.to(self.world.device).reshape(-1)
        losses = F.cross_entropy(logits.flatten(0, 1).float(), flat, reduction="none", ignore_index=self.pad)
        return losses.full_tensor() if isinstance(losses, DTensor) else losses

    @torch.no_grad()
    def validate(self) -> Loss:
        """The loss over the validation windows, independent of the number of ranks. Collective."""
        inputs, targets = self.validation
        # All ranks must run the same number of forward passes, so pad with windows that do not count.
        # A pipeline has as many micro-batches as in training.
        filling = -len(inputs) % (self.world.shares * (1 if self.pipeline is None else self.share))
        inputs, targets = (F.pad(x, (0, 0, 0, filling), value=self.pad) for x in (inputs, targets))
        share = len(inputs) // self.world.shares
        own = slice(self.world.share * share, (self.world.share + 1) * share)
        figures = [0.0, 0.0, 0.0]
        taken = self.micro_batch if self.pipeline is None else self.share
        # A pipeline runs in the context by itself.
        context = nullcontext() if self.pipeline is not None else self.world.sequences or nullcontext()
        with context, without_dropout(self.model):
            for first in range(own.start, own.stop, taken):
                piece = slice(first, min(first + taken, own.stop))
                parts = self._parts(inputs[piece], targets[piece])
                counted = parts[1][parts[1] != self.pad]
                if self.pipeline is None:
                    nats = float(self._losses(*parts).double().sum())
                else:
                    x, y = (tensor[piece].to(self.world.device) for tensor in (inputs, targets))
                    nats = float(self.pipeline.evaluate(x, target=y)) / self.weight
                more = nats, float(len(counted)), self._nbytes(counted)
                figures = [figure + one for figure, one in zip(figures, more, strict=True)]
        if self.pipeline is None:
            # The root keeps its full parameters after forward for a backward, which does not follow here.
            as_fsdp(self.model).reshard()
        sums = self.world.total(self.world.counted(figures))
        return Loss(sums[0], round(sums[1]), round(sums[2]))
