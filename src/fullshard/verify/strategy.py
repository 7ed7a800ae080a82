"""`Strategy`: one way to shard and to train, as a value that is printed and parsed back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fullshard.migrate import ConfigError
from fullshard.migrate.parallelism import Parallelism
from fullshard.migrate.schedules import SCHEDULES, find_schedule, stages_per_rank

_PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Strategy:
    """`reshard`: `reshard_after_forward`. `replicas`: how many ranks hold each shard (HSDP). `precision`: "bf16" or
    "fp16", in which parameters are computed with, and reduced in float32, or with `pure` in it; "fp16" with a scaled
    loss. `norms`: beside it, torch's norms compute in the dtype of their parameters. `micro`: micro-batches of a step,
    of which the last synchronises. `tensor`: ranks of an axis of tensor parallelism; `sequence`, `loss`: with sequence
    and with loss parallelism over it. `context`: ranks that share each sequence; `experts`: that have different ones;
    `cut`: each expert is divided over the ranks of `tensor`.
    pipeline: ranks that have different layers, `stages` of them each (0: as `schedule` has it), with `micro`
    micro-batches in a step.

    >>> parse_strategy("zero2+bf16+micro=2") == Strategy(reshard=False, precision="bf16", micro=2)
    True
    >>> str(parse_strategy("hsdp=2+recompute+zero3=4"))
    'zero3=4+hsdp=2+recompute'
    """

    reshard: bool | int = True
    replicas: int = 1
    precision: str = ""
    pure: bool = False
    norms: bool = False
    offload: bool = False
    micro: int = 1
    recompute: bool = False
    tensor: int = 1
    sequence: bool = False
    loss: bool = False
    context: int = 1
    experts: int = 1
    cut: bool = False
    pipeline: int = 1
    stages: int = 0
    schedule: str = "1F1B"

    def __str__(self) -> str:
        numbers = {"micro": self.micro, "tp": self.tensor, "cp": self.context, "ep": self.experts}
        words = ["zero2" if self.reshard is False else "zero3" if self.reshard is True else f"zero3={self.reshard}"]
        words += [f"hsdp={self.replicas}"] * (self.replicas > 1) + [self.precision] * bool(self.precision)
        words += ["pure"] * self.pure + ["norms"] * self.norms
        words += ["offload"] * self.offload + ["recompute"] * self.recompute
        words += [f"{name}={numbers[name]}" for name in numbers if numbers[name] > 1]
        words += ["etp"] * self.cut + ["sp"] * self.sequence + ["lp"] * self.loss
        if self.pipeline > 1:
            words += [f"pp={self.pipeline}", self.schedule] + [f"stages={self.stages}"] * (self.stages > 1)
        return "+".join(words)

    @property
    def parallelism(self) -> Parallelism:
        """How layers are divided, unless the program says it."""
        return Parallelism(
            self.tensor,
            self.sequence,
            enable_loss_parallel=self.loss,
            data_parallel_replicate_degree=self.replicas,
            context_parallel_degree=self.context,
            expert_parallel_degree=self.experts,
            expert_tensor_parallel_degree=self.tensor if self.cut else 1,
            pipeline_parallel_degree=self.pipeline,
            pipeline_parallel_schedule=self.schedule,
            pipeline_parallel_stages_per_rank=self.stages,
            pipeline_parallel_num_microbatches=self.micro if self.pipeline > 1 else 0,
        )

    @property
    def alike(self) -> int:
        """How many neighbouring ranks get one batch."""
        return self.tensor * self.context

    @property
    def divides(self) -> bool:
        """Whether ranks compute parts of what the plain model computes: their kernels sum in another order."""
        return self.tensor > 1 or self.context > 1 or self.experts > 1 or self.pipeline > 1

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of `precision`; None for that of the parameters."""
        return _PRECISIONS.get(self.precision)

    @property
    def reduce_dtype(self) -> torch.dtype:
        return (self.dtype if self.pure else None) or torch.float32

    def shards(self, world: int) -> int:
        """The number of the `world` ranks over which a parameter is cut. Raises `ValueError` if the strategy does not
        fit them."""
        self._check_pipeline()
        copies = self.replicas * self.tensor * self.pipeline
        if world % copies:
            raise ValueError(f"{self}: expected a world that {copies} divides, found {world}")
        shards = world // copies
        if shards % self.context:
            raise ValueError(f"{self}: expected a number after cp that divides the {shards} ranks of a shard")
        # Of experts the ranks of tp are divided too, unless each is cut over them.
        room = shards if self.cut else shards * self.tensor
        if room % self.experts:
            raise ValueError(f"{self}: expected a number after ep that divides the {room} ranks that share experts")
        if not isinstance(self.reshard, bool) and (shards % self.reshard or self.reshard in (1, shards)):
            raise ValueError(
                f"{self}: expected a number after zero3 that divides the {shards} ranks of a shard, and is neither 1 "
                f"nor {shards}, found {self.reshard}"
            )
        return shards

    def _check_pipeline(self) -> None:
        """Raise `ValueError` for what a pipeline does not have beside it."""
        if self.pipeline == 1:
            return
        schedule = find_schedule(self.schedule)
        if self.precision == "fp16":
            raise ValueError(f"{self}: expected pp without a scaled loss; nearest: bf16")
        if schedule.splits and self.reshard is not False:
            raise ValueError(f"{self}: expected zero2, because {schedule.name} needs full weights in backward")
        try:
            count = self.pipeline * stages_per_rank(schedule, self.stages)
        except ConfigError as error:
            raise ValueError(f"{self}: {error}") from error
        if problem := schedule.problem(self.micro, self.pipeline, count):
            raise ValueError(f"{self}: expected a legal number of micro-batches: {problem}; nearest: micro={count}")


# What is verified unless the user says otherwise.
DEFAULT = ("zero3", "zero2", "zero3+bf16", "zero3+micro=2", "zero3+recompute", "zero3+offload")
WORDS = (
    "zero3, zero3=N, zero2, hsdp=N, bf16, fp16, pure, norms, offload, micro=N, recompute, tp=N, sp, lp, cp=N, ep=N, "
)
WORDS += "etp, pp=N, stages=N, " + ", ".join(SCHEDULES)


def parse_strategy(text: str) -> Strategy:
    """Raises `ValueError` with the words that there are."""
    found = Strategy()
    flags = {name: name for name in ("offload", "recompute", "pure", "norms")} | {
        "sp": "sequence",
        "lp": "loss",
        "etp": "cut",
    }
    numbered = {
        "hsdp": "replicas",
        "micro": "micro",
        "tp": "tensor",
        "zero3": "reshard",
        "cp": "context",
        "ep": "experts",
        "pp": "pipeline",
        "stages": "stages",
    }
    schedules = {known.lower(): known for known in SCHEDULES}
    for word in text.split("+"):
        name, _, number = word.strip().partition("=")
        if name in numbered and number.isdigit() and int(number) > 1:
            given: dict[str, Any] = {numbered[name]: int(number)}
        elif name in ("zero2", "zero3") and not number:
            given = {"reshard": name == "zero3"}
        elif name in _PRECISIONS and not number:
            given = {"precision": name}
        elif name in flags and not number:
            given = {flags[name]: True}
        elif name.lower() in schedules and not number:
            given = {"schedule": schedules[name.lower()]}
        else:
            raise ValueError(f"{text}: expected words of {WORDS} with + between them, found {word!r}")
        found = replace(found, **given)
    if found.pure and not found.precision:
        raise ValueError(f"{text}: expected bf16 or fp16 beside pure, which reduces in that dtype")
    if (found.sequence or found.loss) and found.tensor == 1:
        raise ValueError(f"{text}: expected tp=N beside sp and lp, which are over the ranks of tp")
    if found.cut and (found.tensor == 1 or found.experts == 1):
        raise ValueError(f"{text}: expected tp=N and ep=N beside etp, which cuts each expert over the ranks of tp")
    if found.pipeline > 1 and found.micro == 1:
        schedule = SCHEDULES[found.schedule]
        found = replace(found, micro=found.pipeline * (found.stages or schedule.stages or 2))
    if found.pipeline == 1 and (found.stages or found.schedule != Strategy.schedule):
        raise ValueError(f"{text}: expected pp=N beside a schedule and its stages")
    if found.norms and not found.precision:
        raise ValueError(f"{text}: expected bf16 or fp16 beside norms, which keep the dtype of their parameters")
    return found


# torch's own norms, which take inputs in another dtype than their weights; others may return that of the weights.
_NORMS: tuple[type[nn.Module], ...] = (
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
)
_NORMS += (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def norms_of(model: nn.Module) -> list[nn.Module]:
    """The modules that keep the dtype of their parameters under `norms`."""
    return [module for module in model.modules() if isinstance(module, _NORMS)]
