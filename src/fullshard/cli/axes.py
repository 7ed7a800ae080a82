"""The options of commands that declare axes, and the declaration that they make."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fullshard.migrate.parallelism import Parallelism

_NAMES = ("tensor_parallel", "context_parallel", "expert_parallel", "no_sequence_parallel", "loss_parallel")
_PIPELINE = ("pipeline_parallel", "pipeline_schedule", "stages_per_rank")


def add_axes(command: Any, *, context: bool = False, pipeline: bool = False) -> None:
    """Add the options to the parser of a command. `context`: also those of context and expert parallelism; `pipeline`:
    those of pipelines."""
    command.add_argument("--tensor-parallel", type=int, metavar="N", help="ranks that share each layer (default: 1)")
    command.add_argument(
        "--no-sequence-parallel", action="store_true", help="between these layers each rank has all tokens"
    )
    command.add_argument(
        "--loss-parallel", action="store_true", help="logits stay cut along the vocabulary for the loss"
    )
    if context:
        command.add_argument(
            "--context-parallel", type=int, metavar="N", help="ranks that share each sequence (default: 1)"
        )
        command.add_argument(
            "--expert-parallel", type=int, metavar="N", help="ranks that have different experts (default: 1)"
        )
    if pipeline:
        command.add_argument("--pipeline-parallel", type=int, metavar="N", help="ranks of a pipeline (default: 1)")
        command.add_argument(
            "--pipeline-schedule", metavar="NAME", help="its schedule, by torch's name (default: 1F1B)"
        )
        command.add_argument("--stages-per-rank", type=int, metavar="N", help="of a schedule with several (default: 2)")


def parallelism_of(arguments: argparse.Namespace) -> Parallelism:
    """The declaration that the options make. Raises `ConfigError`."""
    from fullshard.migrate.parallelism import Parallelism

    pipeline = {}
    if (schedule := getattr(arguments, "pipeline_schedule", None)) is not None:
        pipeline["pipeline_parallel_schedule"] = schedule
    return Parallelism(
        pipeline_parallel_degree=getattr(arguments, "pipeline_parallel", None) or 1,
        pipeline_parallel_stages_per_rank=getattr(arguments, "stages_per_rank", None) or 0,
        **pipeline,
        tensor_parallel_degree=arguments.tensor_parallel or 1,
        context_parallel_degree=getattr(arguments, "context_parallel", None) or 1,
        expert_parallel_degree=getattr(arguments, "expert_parallel", None) or 1,
        data_parallel_replicate_degree=arguments.replicas or 1,
        enable_sequence_parallel=False if arguments.no_sequence_parallel else "auto",
        enable_loss_parallel=arguments.loss_parallel,
    )


def refuse_beside_config(arguments: argparse.Namespace, source: str) -> None:
    """Raise `ValueError` for an option that the section of the config `source` has."""
    for name in (*_NAMES, *_PIPELINE):
        if getattr(arguments, name, None):
            raise ValueError(f"--{name.replace('_', '-')}: {source} has a section [parallelism]; set it there")
