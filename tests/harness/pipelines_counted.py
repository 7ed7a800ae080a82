"""What one rank of a pipeline holds and sends in a step, counted on gloo; and the plan of the same step."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard import Parallelism, Program, prepare_fully_shard
from fullshard.engine.unit import module_units
from fullshard.migrate.declared import noted_by
from fullshard.plan import Plan, Planner, Strategy, find_hardware
from fullshard.plan.tape import note
from fullshard.train.model import Llama, LlamaShape
from fullshard.train.planned import described_by, table_of
from tests.harness.models import adamw, seeded
from tests.harness.planned import Real, _locals

VOCABULARY, TOKENS = 120, 32


def llama(layers: int = 4, tokens: int = TOKENS) -> nn.Module:
    model = Llama(LlamaShape(VOCABULARY, layers, 64, 4, 2, 160, tokens, tie_embeddings=False))
    if not model.embedding.weight.is_meta:
        model.init_weights()
    return model


def batch(index: int, samples: int, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(index)
    whole = torch.randint(VOCABULARY, (samples, tokens + 1), generator=generator)
    return whole[:, :-1].clone(), whole[:, 1:].clone()


def loss_fn(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1).float(), target.flatten())


class Counted(NamedTuple):
    """Bytes of one rank: at rest of shards and buffers, of state, of kept message buffers, of what it received; and the
    most in a step before the optimizer, and in all of it, beyond these. `messages`: of a step, by kind and group,
    how many and with how many bytes; `stages`: of the rank."""

    shards: int
    state: int
    kept: int
    received: int
    step: int
    optimizer: int
    messages: dict[tuple[str, str], tuple[int, int]]
    stages: tuple[int, ...]

    @property
    def rest(self) -> int:
        return self.shards + self.state + self.kept + self.received


class Messages(TorchDispatchMode):
    """Counts messages by their kind and the group: "pp" for one of torch's, "own" for one of the library's, "tp" where
    layers send."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, str]] = Counter()
        self.nbytes: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2].strip("_")
        if func.namespace == "_c10d_functional" and name not in ("wait_tensor", "wrap_tensor_autograd"):
            self.counts[name, "tp"] += 1
        elif func.namespace == "c10d" and name not in ("recv", "barrier"):
            names = [argument.name for argument in func._schema.arguments]
            group = dist.ProcessGroup.unbox(args[names.index("process_group")])
            whole = {"allgather_base": 0, "allreduce": 0, "send": 0}.get(name, 1)
            axis = "pp" if group in dist.distributed_c10d._world.pg_group_ranks else "own"
            self.counts[name, axis] += 1
            self.nbytes[name, axis] += sum(t.nbytes for t in _locals([args[whole]]))
        return func(*args, **(kwargs or {}))


def counted(
    rank: int, make: Callable[[], nn.Module], plan: dict[str, Any], config: Any, samples: int, tokens: int
) -> Counted:
    """Three steps of a rank; what the third holds, and what the fourth sends."""
    model = seeded(make)
    optimizer = adamw((p for p in model.parameters() if p.requires_grad), watched=False)
    prepared = prepare_fully_shard(model, optimizer, config, parallelism=plan, loss_fn=loss_fn, show=False)
    pipeline = prepared.pipeline
    assert pipeline is not None

    def take(step: int, before_optimizer: Callable[[], None] = lambda: None) -> None:
        x, y = batch(100 * step + prepared.share[0], samples, tokens)
        prepared.step(x, target=y)
        before_optimizer()
        optimizer.step()
        optimizer.zero_grad()

    take(0)
    take(1)
    gc.collect()
    units = [unit for stage in pipeline.stages.values() for unit in module_units(stage)]
    shards = sum(group.flat.nbytes for unit in units for group in unit.groups)
    shards += sum(buffer.nbytes for stage in pipeline.stages.values() for buffer in stage.buffers())
    state = sum(t.nbytes for t in _locals(v for s in optimizer.state.values() for v in s.values()))
    pools = {id(unit.root): unit.root.shared.pool.nbytes for unit in units if unit.root is not None}
    made = next(iter(pipeline._made.values()))
    stages = getattr(made, "_stages", None) or [made._stage]
    infos = [info for stage in stages for each in stage.args_recv_info.values() for info in each]
    infos += [info for stage in stages for each in stage.grad_recv_info.values() for info in each]
    buffers = {
        info.buffer.untyped_storage().data_ptr(): info.buffer.nbytes for info in infos if info.buffer is not None
    }
    gc.disable()
    with Real() as counter:
        # They are replaced without an operation that has them, where the stage before is on this rank.
        counter._know([info.buffer.untyped_storage() for info in infos if info.buffer is not None])
        counter.mark("step")
        take(2, lambda: counter.mark("optimizer"))
    gc.enable()
    with Messages() as sent:
        take(3)
    messages = {key: (count, sent.nbytes[key]) for key, count in sent.counts.items()}
    peaks = counter.peak("step"), counter.peak("optimizer")
    received = sum(buffers.values())
    return Counted(shards, state, sum(pools.values()), received, *peaks, messages, tuple(pipeline.stages))


def planned(
    make: Callable[[], nn.Module], plan: Parallelism, world: int, samples: int, tokens: int, **dials: Any
) -> Plan:
    """The plan of that step. `samples`: of a rank in a step; `dials`: of the strategy."""
    axes = plan.on(world)
    number = plan.pipeline_parallel_num_microbatches or plan.num_stages
    micro = samples // number

    def loss(model: nn.Module, parts: tuple[Tensor, Tensor]) -> Tensor:
        output: Any = model(parts[0])
        return loss_fn(getattr(output, "logits", output), parts[1])

    program = Program(make, loss, partial(batch, samples=micro, tokens=tokens), loss_fn=loss_fn)
    if plan.tensor_parallel_degree > 1:
        from dataclasses import replace

        program = replace(program, parallelize=noted_by(plan, axes.shards * axes.tp, note))
    reshard = dials.pop("reshard", False)
    strategy = Strategy(
        world,
        axes.dp_replicate,
        reshard=reshard,
        root_reshard=reshard,
        micro=micro,
        accumulate=number,
        backend="gloo",
        tensor=axes.tp,
        pipeline=axes.pp,
        schedule=plan.pipeline_parallel_schedule,
        stages=plan.num_stages // axes.pp,
        **dials,
    )

    def described(size: int, sequence: int | None, compute: str, alone: bool, recompute: Any) -> Any:
        sizes = {"samples": size, "compute": compute, "recompute": recompute, "on_cpu": True}
        return described_by(plan, program, "model", world, **sizes)

    return Planner(described, find_hardware("cpu"), table=table_of).plan(strategy)
