"""A config of the trainer as `fullshard plan` takes it: its model, its strategy, and the hardware of this machine."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fullshard.migrate.declared import noted_by
from fullshard.migrate.parallelism import Parallelism
from fullshard.migrate.schedules import find_schedule
from fullshard.plan import Plan, Planner, Strategy, find_hardware
from fullshard.plan.description import Model
from fullshard.plan.facts import Alike, describe, describe_stages, measured_cpu, physical_nbytes
from fullshard.plan.machine import PROFILES
from fullshard.plan.pipeline import Table, read_table
from fullshard.plan.recomputation import keeping, on_host
from fullshard.plan.result import duration, gigabytes
from fullshard.plan.search import Ways
from fullshard.plan.tape import note
from fullshard.program import Program
from fullshard.train.config import Config, invalid
from fullshard.train.data import ByteTokenizer
from fullshard.train.folder_tokenizer import open_tokenizer
from fullshard.train.metrics import read_metrics
from fullshard.train.model import llama_shape
from fullshard.train.pretrained import open_pretrained, program_of
from fullshard.train.process import device_kind, threads_per_process
from fullshard.train.shapes import language_model

# The optimizers of `fullshard plan` by `optimizer.name`.
_PLANNED = {"adamw": "adamw-foreach", "sgd": "sgd-momentum", "muon": "muon"}


def programs_of(config: Config, world: int) -> Callable[[int | None], Program]:
    """The program of the config on `world` processes for a length of sequences, None for its own. A BPE tokenizer is
    taken to have all of its tokens."""
    plan, axes = config.sharding.parallel, config.axes(world)
    parts, shared = axes.cp, axes.shards * axes.tp
    if config.model.folder:
        divided = noted_by(plan, shared, note)

        def of_folder(sequence: int | None) -> Program:
            length = (sequence or config.training.sequence_length) // parts
            return replace(program_of(config, length), parallelize=divided)

        return of_folder
    vocabulary = config.data.bpe_vocab if config.data.tokenizer == "bpe" else ByteTokenizer().vocab
    if config.data.tokenizer_folder:
        vocabulary = open_tokenizer(config.data).vocab
    shape = llama_shape(config, vocabulary)

    def made(sequence: int | None) -> Program:
        length = (sequence or config.training.sequence_length) // parts
        return replace(language_model(shape, length), parallelize=noted_by(plan, shared, note))

    return made


def strategy_of(config: Config, world: int, backend: str) -> Strategy:
    """How the trainer shards and trains on `world` processes; after `Config.check_world`."""
    keys, micro, sharding, axes = (
        config.training,
        config.micro_batch(world),
        config.sharding.sharding,
        config.axes(world),
    )
    if config.optimizer.name not in _PLANNED:
        problem = "fullshard plan does not count its state"
        raise invalid("optimizer.name", config.optimizer.name, problem, '"adamw"')
    optimizer = _PLANNED[config.optimizer.name]
    if config.optimizer.name == "sgd" and not config.optimizer.momentum:
        optimizer = "sgd"
    param, reduce, _ = config.sharding.precision.dtypes
    kept, plan = config.reshards, config.sharding.parallel
    return Strategy(
        ranks=world,
        replicas=axes.dp_replicate,
        reshard=True if isinstance(kept, str) else kept,
        root_reshard=kept if isinstance(kept, bool) else None,
        compute=param or "",
        reduce=reduce or "",
        micro=micro,
        accumulate=keys.global_batch // axes.shares // micro,
        send_each=keys.accumulate == "reduce",
        recompute=_recomputed(config),
        offload=sharding.cpu_offload,
        optimizer=optimizer,
        backend=backend,
        tensor=axes.tp,
        context=axes.cp,
        experts=axes.ep,
        pipeline=axes.pp,
        schedule=plan.pipeline_parallel_schedule,
        stages=plan.num_stages // axes.pp,
    )


def described_by(
    plan: Parallelism,
    program: Program,
    name: str,
    ranks: int,
    output: str | None = None,
    *,
    alike: dict[object, Alike] | None = None,
    **sizes: Any,
) -> Model:
    """`program` as data, as one rank of `ranks` has it by `plan`; of a pipeline each of its stages. `output`: the dtype
    of what stages give, None for the one that it has. `alike`: for a pipeline with `blocks` among `sizes`: stages that
    stand for others, by the other degrees (`describe_stages`)."""
    cuts = plan.tensor_parallel_degree > 1
    shared = plan.context_parallel_degree > 1 or plan.expert_parallel_degree > 1
    sizes |= {"tensor": plan.tensor_parallel_degree, "shared": shared}
    if plan.pipeline_parallel_degree == 1:
        return describe(program, name, **sizes)
    # torch's pipelines are imported where there are any.
    from fullshard.migrate.stage_programs import StagePrograms

    program = program if cuts or shared else replace(program, parallelize=None)
    dtype = None if output is None else getattr(torch, output)
    found = None
    if sizes.pop("blocks", 0):
        others = ranks // plan.pipeline_parallel_degree if plan.expert_parallel_degree > 1 else 0
        degrees = plan.tensor_parallel_degree, plan.expert_parallel_degree, others
        found = {} if alike is None else alike.setdefault(degrees, {})
    return describe_stages(StagePrograms(program, plan, plan.on(ranks), output=dtype), name, alike=found, **sizes)


@contextmanager
def without_old_objects() -> Iterator[None]:
    """Keeps the collector of garbage, which each recording of a step asks, from objects that are there already, such as
    all of torch."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@lru_cache(maxsize=64)
def _table(schedule: str, ranks: int, stages: int, number: int) -> Table:
    from fullshard.migrate.schedule_tables import rows_of

    return read_table(rows_of(find_schedule(schedule), ranks, stages, number))


def table_of(strategy: Strategy) -> Table:
    """Returns what the ranks of the pipeline of `strategy` do, action by action. Raises `ConfigError` for a number of
    micro-batches that its schedule does not take."""
    return _table(strategy.schedule, strategy.pipeline, strategy.stages, strategy.accumulate)


def _recomputed(config: Config) -> str | tuple[str, ...]:
    """Returns the way of recomputation for all units, or for each, the root first."""
    keys = config.sharding.activation_checkpointing
    way = "none"
    if keys.at != "none" and keys.recompute:
        way = keeping(keys.save) if keys.save else "whole"
    if keys.offload:
        way = on_host(way)
    if way == "none":
        return way
    if keys.every == 1:
        return way
    layers = config.model.layers
    if config.model.folder:
        layers = open_pretrained(config).told.get_text_config().num_hidden_layers
    blocks = range(1, layers + 1)
    return ("none", *("none" if number % keys.every else way for number in blocks))


# ---- fullshard train --plan ------------------------------------------------------------------------------------


def plan_here(config: Config, world: int) -> Plan:
    """The plan of a run on this machine: its CPU, measured with the threads of one process, or its devices by name."""
    kind, here = device_kind(config), int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if kind == "cpu":
        threads = torch.get_num_threads()
        torch.set_num_threads(threads_per_process(config, world))
        hardware = replace(measured_cpu(find_hardware("cpu")), memory=physical_nbytes() / here)
        torch.set_num_threads(threads)
    else:
        called = torch.cuda.get_device_name()
        names = {name.partition("-")[0]: name for name in PROFILES}
        known = next((full for name, full in names.items() if name in called.lower()), None)
        hardware = find_hardware(known or "h100-80g")
        # A device without a profile goes by another's speed, and says so in the table's first line.
        name = hardware.name if known else f"{called}, planned as {hardware.name}"
        memory, host_memory = float(torch.cuda.get_device_properties(0).total_memory), physical_nbytes() / here
        hardware = replace(hardware, name=name, memory=memory, host_memory=host_memory)
    programs = programs_of(config, world)

    strategy = strategy_of(config, world, hardware.backend)

    def described(samples: int, sequence: int | None, compute: str, alone: bool, recompute: Ways) -> Model:
        sizes: dict[str, Any] = {"samples": samples, "compute": compute, "alone": alone, "recompute": recompute}
        sizes["on_cpu"] = hardware.blocking
        keys = config.sharding
        name, output = "the trainer's model", keys.precision.dtypes[2]
        return described_by(keys.parallel, programs(sequence), name, world, output, **sizes)

    return Planner(described, hardware, table=table_of).plan(strategy)


def compared(plan: Plan, run_dir: Path) -> str:
    """One line: the predicted step beside the median of those that the run measured. Memory is compared on devices
    alone: on a CPU the run measures the process, with its libraries."""
    records = read_metrics(run_dir / "metrics.jsonl")
    if not records:
        return "plan: the run measured no step"
    seconds = median(record["seconds"] for record in records)
    line = f"plan: a step was predicted to take {duration(plan.seconds)} and took {duration(seconds)} (median)"
    if not plan.hardware.blocking:
        held = max(record["memory_bytes"] for record in records)
        there = sum(nbytes for name, nbytes in plan.terms if name in ("parameters", "optimizer", "buffers"))
        line += f"; between steps {gigabytes(there)} were predicted, {gigabytes(held)} measured"
    return line
