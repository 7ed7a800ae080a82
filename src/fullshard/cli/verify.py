"""`fullshard verify`: sharded training equals plain training, on the user's own model."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

BUILTIN = "fullshard.train.program:program"
_EXAMPLES = """\
examples:
  fullshard verify                                          the trainer's model, on two processes
  fullshard verify train.toml                               the model of a config of the trainer
  fullshard verify verify_me:program                        your model: a function that returns a fullshard.Program
  fullshard verify verify_me:program --strategies zero3+bf16 zero3+hsdp=2+micro=2 --nproc 4
  fullshard verify verify_me:program --against torch        the same for torch's FSDP2, beside
  fullshard verify verify_me:program --html equal.html      a page with pictures

A strategy is made of words with + between them:
  zero3 zero2 zero3=N     parameters are freed after each forward, or not, or N ranks keep them together
  hsdp=N tp=N             N replicas; tensor parallelism over N ranks, by the program's `parallelize` or the model's own
                          styles; sp, lp beside it: with sequence parallelism, with the loss of logits that stay cut
  cp=N ep=N               sequences cut over N ranks: batches are tensors, or a mapping, with tokens along their second
                          dim, and with the positions that the model needs; experts divided over N ranks;
                          etp beside tp=N and ep=N: each expert cut over the ranks of tp
  pp=N                    layers over N ranks, with micro=N micro-batches in a step; beside it a schedule, such as 1F1B,
                          and stages=N of each rank. The program has a loss_fn(output, target)
  bf16 fp16               computed with in that dtype, reduced in float32; fp16 with a scaled loss
  pure                    beside them: reduced in that dtype, too
  norms                   beside them: torch's norms compute in the dtype of their parameters
  micro=N                 N micro-batches, the last of which synchronises
  offload recompute       shards in host memory; activations computed again in backward

exit codes: 0 equal; 1 different; 2 could not run
"""


def add_command(commands: Any) -> None:
    """Add `verify` to the parser of the command line."""
    verify = commands.add_parser(
        "verify",
        help="prove on your model that sharded training equals plain training",
        description=(
            "Train a few steps sharded, take each step again in one process, and name the first difference and "
            "its cause."
        ),
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verify.add_argument(
        "program",
        nargs="?",
        default=BUILTIN,
        metavar="MODULE:FUNCTION | CONFIG.toml",
        help="yours, or a config of the trainer (default: the trainer's model)",
    )
    verify.add_argument("--strategies", nargs="+", metavar="STRATEGY", help="default: six of them")
    verify.add_argument("--nproc", type=int, default=2, metavar="N", help="processes (default: 2)")
    verify.add_argument("--steps", type=int, default=3, metavar="N", help="steps of each strategy (default: 3)")
    verify.add_argument(
        "--steps-only", action="store_true", help="leave out clipping, evaluation, loading and full_params"
    )
    verify.add_argument("--against", choices=("torch",), help="verify torch's FSDP2 too, and compare with it")
    verify.add_argument("--device", default="cpu", help="cpu (default); cuda, one for each process; auto")
    verify.add_argument("--json", action="store_true", help="one JSON object on stdout")
    verify.add_argument("--html", type=Path, metavar="FILE", help="write a page with pictures")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; its exit code."""
    from fullshard.program import ProgramError
    from fullshard.verify import page
    from fullshard.verify.run import is_verified, say, verify
    from fullshard.verify.strategy import DEFAULT, parse_strategy

    try:
        strategies = [
            parse_strategy(text)
            for text in arguments.strategies or _declared(arguments.program, arguments.nproc) or DEFAULT
        ]
        for name, value in (("--nproc", arguments.nproc), ("--steps", arguments.steps)):
            if value < 1:
                raise ValueError(f"{name} {value}: expected at least 1")
        if arguments.html is not None and (arguments.html.is_dir() or not arguments.html.parent.is_dir()):
            problem = "found a folder" if arguments.html.is_dir() else f"found no folder {arguments.html.parent}"
            raise ValueError(f"--html {arguments.html}: expected a file to write, {problem}")
        entry = f"{BUILTIN}:{arguments.program}" if arguments.program.endswith(".toml") else arguments.program
        results = verify(
            entry,
            strategies,
            world=arguments.nproc,
            steps=arguments.steps,
            libraries=("fullshard", "torch") if arguments.against else ("fullshard",),
            device=arguments.device,
            steps_only=arguments.steps_only,
            tell=say,
        )
    except (ProgramError, ValueError) as error:
        print(f"fullshard verify: {error}", file=sys.stderr)
        return 2
    if arguments.html is not None:
        arguments.html.write_text(page.page(arguments.program, results))
    print(json.dumps(page.as_json(arguments.program, results)) if arguments.json else page.table(results))
    return is_verified(results)


def _declared(program: str, world: int = 2) -> list[str]:
    """The strategy of the axes that a config of the trainer declares; empty without axes beside data parallelism.
    Raises `ProgramError` for a pipeline that `world` processes cannot have."""
    from fullshard.migrate.schedules import find_schedule
    from fullshard.program import ProgramError
    from fullshard.train.config import ConfigError, load_config

    if not program.endswith(".toml"):
        return []
    try:
        config = load_config(Path(program))
        sharding, pipelined = config.sharding, config.sharding.parallelism.pipeline_parallel_degree > 1
        if pipelined:
            config.check_world(world)
    except ConfigError as error:
        raise ProgramError(str(error)) from error
    keys, copies = sharding.parallelism, sharding.sharding.data_parallel_replicate_degree
    degrees = {
        "hsdp": copies,
        "tp": keys.tensor_parallel_degree,
        "cp": keys.context_parallel_degree,
        "ep": keys.expert_parallel_degree,
    }
    if not pipelined and all(size == 1 for name, size in degrees.items() if name != "hsdp"):
        return []
    if keys.module_fqns_per_model_part:
        raise ProgramError(
            f"{program}: expected a pipeline with the split that is chosen, found module_fqns_per_model_part, which a "
            f"strategy does not have; leave it out here"
        )
    kept = config.reshards if pipelined else True
    words = ["zero2" if kept is False else "zero3" if isinstance(kept, bool | str) else f"zero3={kept}"]
    words += [*[f"{name}={size}" for name, size in degrees.items() if size > 1]]
    if keys.tensor_parallel_degree > 1:
        words += ["sp"] * (keys.enable_sequence_parallel is not False) + ["lp"] * keys.enable_loss_parallel
    if pipelined:
        number = config.training.global_batch // config.axes(world).shares // config.micro_batch(world)
        words += [f"micro={number}"] * (number > 1) + [f"pp={keys.pipeline_parallel_degree}"]
        words += [find_schedule(keys.pipeline_parallel_schedule).name]
        words += [f"stages={keys.pipeline_parallel_stages_per_rank}"] * (keys.pipeline_parallel_stages_per_rank > 1)
    return ["+".join(words)]
