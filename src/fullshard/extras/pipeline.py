"""`Pipeline`: the stages of this rank with a schedule of torch, as one step of all ranks of the pipeline.

A step compares what the ranks were given, runs the schedule, and gives every rank the loss. Schedules are made when
they are needed, one for each shape of micro-batches: torch's have buffers of one shape. If a rank raises, the others
wait for its tensors in calls of torch, which nothing but a closed connection ends: it writes its error to the store,
and closes the connections of the pipeline.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..agree.recovery import peers_below
from ..api import FSDPModule
from ..comm import all_reduce_over
from ..comm.data_group import cut_host, is_of_connections
from ..peers import PeerFailed, RanksDisagree, silent_store, watch
from .experts import StageBalance

LossFn = Callable[[Any, Tensor], Tensor]
# Called with what this rank was given, what it means to do with it, and what is wrong with it ("": nothing). Raises on
# all ranks if they differ.
Compare = Callable[[Sequence[Tensor], str, str], None]
# Called with the arguments, the target and the number of micro-batches; returns what this rank has of them.
Parts = Callable[[tuple[Any, ...], dict[str, Any], Tensor, int], tuple[tuple[Any, ...], dict[str, Any], Tensor]]

# How long a rank whose connections were closed looks for the reason, and how often.
_REASON_SECONDS, _LOOK_SECONDS = 5.0, 0.05
# The key of the schedule of the caller's own code.
_OWN_CODE = ("own code",)
# Schedules that are kept, each with the buffers of its micro-batches.
_KEPT = 4


class Beside(NamedTuple):
    """The rest of a step. context: of forwards, losses and backwards. parts: cuts a batch, after ranks compared it, for
    those that share its sequences. sums: surrounds a step, and adds gradients of parameters that stages share.
    balances: the losses of the experts of each stage. alone: what a schedule by itself lacks, "" if it is all."""

    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    parts: Parts | None = None
    sums: Callable[[], AbstractContextManager[None]] = nullcontext
    balances: Sequence[StageBalance] = ()
    alone: str = ""


class Pipeline:
    """The stages of this rank, and their steps. Made by `prepare_fully_shard`.

    stages: the modules, by the number of their stage. count: the stages of all ranks. group: the ranks of the pipeline.
    number: of micro-batches in a step; 0 for as many as there are of `size` samples. mean: whether `loss_fn` takes the
    mean over a micro-batch, so that gradients and loss are those of the mean over the batch; else they are sums.
    beside: what the steps do beside the schedule.
    """

    # Says to people what each stage has.
    told: Sequence[str] = ()

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        count: int,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        schedule: str,
        number: int,
        size: int = 0,
        loss_fn: LossFn | None = None,
        mean: bool = True,
        compare: Compare | None = None,
        numbers: Callable[[int], Sequence[int]] | None = None,
        beside: Beside | None = None,
    ) -> None:
        self.stages, self.count = dict(stages), count
        self.group, self.device = group, device
        # Imported where a pipeline is made: it brings torch's compiler, nearly half of what the import would take.
        from torch.distributed.pipelining.schedules import get_schedule_class

        self.schedule_class: Any = get_schedule_class(schedule)
        self.number, self.size = number, size
        self.loss_fn, self.mean = loss_fn, mean
        self._compare, self._numbers, self._beside = compare, numbers, beside or Beside()
        self._made: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
        self._steps = 0
        # Why it cannot be used any more.
        self._broken = ""

    @property
    def is_first(self) -> bool:
        """Whether this rank has the first stage, which reads the inputs."""
        return 0 in self.stages

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage, which reads the targets."""
        return self.count - 1 in self.stages

    @property
    def schedule(self) -> Any:
        """torch's schedule object, for your own code: `step` with inputs on the first stage, `target` and `losses` on
        the last. Nothing is compared, and a rank that raises leaves the others to torch's time limit. Needs the number
        of micro-batches. All of its steps have inputs of one shape."""
        if not self.number:
            raise ValueError(
                "pipeline_parallel_num_microbatches: expected it for a schedule of your own code, found the size "
                "of micro-batches alone; give their number, or call prepared.step"
            )
        if self._beside.alone:
            raise ValueError(
                f"expected prepared.step for a pipeline with {self._beside.alone}, found a schedule of your own code, "
                f"which would train something else; call prepared.step"
            )
        return self._schedule(_OWN_CODE, self.number, train=True)

    def step(self, *args: Any, target: Tensor, **kwargs: Any) -> Tensor:
        """Forward and backward of this rank's share of a batch, in micro-batches; returns the loss, (), float32, the
        same on all ranks of the pipeline, with the balance losses of `MixtureOfExperts` of all stages. Gradients are on
        the parameters afterwards, reduced once.

        args, kwargs: of the model, tensors with the samples in dim 0, and plain values. All ranks of a pipeline give
        the same. Positional ones go to the first stage, the others to each. target: (samples, ...).

        Raises on all ranks in bounded time: `ValueError` for a batch that has no such micro-batches, `RuntimeError` if
        ranks were given different ones, `PeerFailed` if a stage of another rank raised. After that the pipeline is
        over: end the processes and begin with a checkpoint.
        """
        return self._run(args, kwargs, target, train=True)

    @torch.no_grad()
    def evaluate(self, *args: Any, target: Tensor, **kwargs: Any) -> Tensor:
        """The loss as `step` returns it, without gradients. Full parameters are freed afterwards."""
        return self._run(args, kwargs, target, train=False)

    # ---- one step --------------------------------------------------------------------------------------------------

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Tensor, *, train: bool) -> Tensor:
        if self._broken:
            raise RuntimeError(f"expected a pipeline whose ranks are all there, found that {self._broken}")
        if self.loss_fn is None:
            raise ValueError(
                "loss_fn: expected a function of (output, target), found none; pass it to prepare_fully_shard"
            )
        what = "step" if train else "evaluate"
        tensors = [value for value in (*args, *kwargs.values(), target) if isinstance(value, Tensor)]
        number, problem = self._micro_batches(tensors, args, target)
        shapes = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors]
        try:
            if self._compare is not None:
                self._compare(tensors, f"prepared.{what} in {number} micro-batches of {shapes}", problem)
            elif problem:
                raise ValueError(problem)
            if self._beside.parts is not None:
                args, kwargs, target = self._beside.parts(args, kwargs, target, number)
        except Exception as error:
            # All ranks of this pipeline raise; those of the others wait for the parameters of this one.
            self._tell(error, what)
            raise
        self._steps += 1
        losses: list[Tensor] = []
        for balance in self._beside.balances:
            balance.scale = 1.0 / number
            balance.values.clear()
        try:
            schedule = self._schedule((what, number, *shapes), number, train=train)
            given: dict[str, Any] = {"target": target, "losses": losses} if self.is_last else {}
            run = schedule.step if train else schedule.eval
            # torch 2.10 refuses strides other than those of a contiguous tensor.
            args = tuple(value.contiguous() if isinstance(value, Tensor) else value for value in args)
            with self._beside.sums() if train else nullcontext(), self._beside.context():
                run(*(args if self.is_first else ()), **given, **kwargs, return_outputs=False)
            if not train:
                self._free()
            return self._shared(losses, number)
        except BaseException as error:
            self._failed(error, what)

    def _micro_batches(self, tensors: Sequence[Tensor], args: Sequence[Any], target: Any) -> tuple[int, str]:
        """How many there are, and what is wrong with the batch, if anything is."""
        if not args or not isinstance(args[0], Tensor) or not isinstance(target, Tensor):
            return 0, "expected a tensor as the first input, and one as target, with the samples in dim 0"
        samples = args[0].shape[0] if args[0].ndim else 0
        for tensor in tensors:
            if tensor.ndim == 0 or tensor.shape[0] != samples:
                return 0, (
                    f"expected tensors with the {samples} samples of the batch in dim 0, found one of "
                    f"{tuple(tensor.shape)}; expand it"
                )
        legal = list(self._numbers(samples)) if self._numbers is not None else []
        number = self.number or (samples // self.size if samples % self.size == 0 else 0)
        if number and samples and samples % number == 0 and (number in legal or not legal):
            return number, ""
        asked = f"{self.number} micro-batches" if self.number else f"micro-batches of {self.size} samples"
        wanted = self.number or samples / self.size
        near = f"{min(legal, key=lambda n: (abs(n - wanted), n))} micro-batches" if legal else "a larger batch"
        return (
            0,
            f"expected a batch that is {asked}, as the schedule takes them, found {samples} samples; nearest: {near}",
        )

    def balances(self, number: int) -> list[Tensor]:
        """The balance losses of this rank's stages in the last step of `number` micro-batches, of each micro-batch."""
        # The first step of a schedule computes one micro-batch before, for the shapes.
        found = [balance.values[-number:] for balance in self._beside.balances if balance.values]
        return [torch.stack(parts).sum() for parts in zip(*found, strict=True)]

    def _shared(self, losses: Sequence[Tensor], number: int) -> Tensor:
        """The loss on all ranks: that of the last stage, and the balance losses of all."""
        total = torch.zeros((), dtype=torch.float32, device=self.device)
        if self.is_last:
            # Of means each is divided by their number.
            total += torch.stack([whole_loss(loss) for loss in losses]).float().sum()
        if self.mean:
            for balance in self.balances(number):
                total += balance / number
        all_reduce_over(total, self.group, dist.ReduceOp.SUM, "the loss of a pipeline")
        return total

    def _free(self) -> None:
        """Free the full parameters that a forward without backward leaves."""
        for stage in self.stages.values():
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    # ---- schedules -------------------------------------------------------------------------------------------------

    def _schedule(self, key: tuple[Any, ...], number: int, *, train: bool) -> Any:
        if key in self._made:
            self._made.move_to_end(key)
            return self._made[key]
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import PipelineScheduleSingle, ScheduleGPipe

        stages = [
            PipelineStage(module, index, self.count, self.device, group=self.group)
            for index, module in self.stages.items()
        ]
        single = issubclass(self.schedule_class, PipelineScheduleSingle)
        kind: Any = ScheduleGPipe if single and not train else self.schedule_class
        # torch's own way divides gradients after they were reduced, and with them those of an earlier step.
        own, parts = key == _OWN_CODE, number if self.mean else 1
        loss: Any = self._loss if own or parts == 1 else lambda *given, **more: self._loss(*given, **more) / parts
        scales = own and self.mean
        made: Any = kind(stages[0] if single else stages, number, loss_fn=loss, scale_grads=scales)
        if not train and not single:
            order = made.pipeline_order_with_comms
            for actions in order.values():
                actions[:] = [part for action in actions for part in _forwards(action)]
        if train:
            # Its first step runs a backward that learns shapes, before it says so itself: nothing is reduced in that.
            for stage in self.stages.values():
                if isinstance(stage, FSDPModule):
                    stage.set_requires_gradient_sync(False)
        self._made[key] = made
        while len(self._made) > _KEPT:
            self._made.popitem(last=False)
        return made

    def _loss(self, output: Any, target: Tensor, **kwargs: Any) -> Tensor:
        assert self.loss_fn is not None
        loss = self.loss_fn(output, target)
        if not isinstance(loss, Tensor) or loss.ndim:
            found = f"one of {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise TypeError(f"loss_fn: expected it to return a tensor of (), found {found}")
        return loss

    # ---- failures --------------------------------------------------------------------------------------------------

    @property
    def _key(self) -> str:
        ranks = ".".join(map(str, dist.get_process_group_ranks(self.group)))
        return f"fullshard/pipeline/{ranks}/{self._steps}"

    def _failed(self, error: BaseException, what: str) -> NoReturn:
        """Tell the others, end what they wait for, and raise what ended the step."""
        cause = _cause(error)
        told = isinstance(cause, RuntimeError) and not isinstance(cause, PeerFailed | RanksDisagree)
        reason = self._reason() if told and is_of_connections(cause) else ""  # type: ignore[arg-type]
        numbers = " and ".join(map(str, self.stages))
        if not reason:
            own = f"rank {dist.get_rank()} (stage {numbers}) raised in prepared.{what}: {type(cause).__name__}: {cause}"
            mine = str(cause) if isinstance(cause, PeerFailed | RanksDisagree) else own
            with suppress(RuntimeError, OSError):
                if (here := watch()) is not None:
                    here.records.store.set(self._key, mine)
        self._broken = reason or f"a step ended with {type(cause).__name__}: {cause}"
        self._broken += "; end the processes, and begin with a checkpoint"
        self._cut()
        followed: BaseException = cause
        if reason:
            rank = int(reason.split()[1]) if reason.startswith("rank ") else -1
            followed = PeerFailed(
                f"expected every rank of the pipeline to end prepared.{what}, found that {reason}",
                rank=rank,
                text=reason,
            )
        self._tell(followed, what)
        if followed is error:
            raise error
        raise followed from error

    def _tell(self, error: BaseException, what: str) -> None:
        """Report an error to the ranks that have other parts of the parameters of these stages."""
        with suppress(ValueError):
            peers_below(*self.stages.values()).publish(error, f"prepared.{what}")

    def _reason(self) -> str:
        """Why connections were closed, as the rank says that closed them, or that the store does not answer; "" if none
        does in time."""
        end = time.monotonic() + _REASON_SECONDS
        try:
            here = watch()
            while here is not None and time.monotonic() < end:
                if here.records.store.check([self._key]):
                    return here.records.store.get(self._key).decode()
                time.sleep(_LOOK_SECONDS)
        except (RuntimeError, OSError):
            return silent_store().message
        return ""

    def _cut(self) -> None:
        """End all waits on the pipeline's connections, here and on its other ranks."""
        if dist.get_world_size(self.group) == 1:
            return
        with suppress(RuntimeError):
            if dist.get_backend(self.group) == "nccl":
                abort: Any = getattr(self.group, "abort", None)
                abort()
            else:
                cut_host(self.group, self.device)


def whole_loss(loss: Tensor) -> Tensor:
    """A loss without its gradient, as a plain tensor."""
    loss = loss.detach()
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def _forwards(action: Any) -> list[Any]:
    """Returns what a forward needs of an action of a schedule; of two that overlap, that of them."""
    if action is None:
        return []
    if getattr(action, "sub_actions", None):
        return [part for inner in action.sub_actions for part in _forwards(inner)]
    kept = ("FORWARD", "SEND_F", "RECV_F", "UNSHARD", "RESHARD")
    return [action] if action.computation_type.name in kept else []


def _cause(error: BaseException) -> BaseException:
    """Returns what a stage raised, without what torch puts around it."""
    while isinstance(error, RuntimeError) and "failed to run forward" in str(error) and error.__cause__ is not None:
        error = error.__cause__
    return error
