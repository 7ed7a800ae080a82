"""`fullshard train` and `fullshard generate`: what can be asked of them, and how they answer.

Exit codes: 0 the run ended well, 1 it failed, 2 the command or the configuration cannot be run, 75 it stopped behind a
step when SIGTERM asked for it, with a checkpoint, 128 + n it was interrupted by signal n (130 for Ctrl-C).
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from .config import AUTO, Config, ConfigError
from .config_load import load_config, to_toml

_NEWEST = object()

_EXAMPLES = """\
examples:
  fullshard train                                  two processes, the corpus inside Python, one to three minutes
  fullshard train my.toml --nproc 4                a configuration of your own on four processes
  fullshard train --set training.steps=50 --set data.corpus=path:book.txt
  fullshard train --print-config > my.toml         every key, its value and its meaning
  fullshard train --resume runs/20260102-030405    go on from the newest checkpoint of a run
  torchrun --nproc-per-node 2 -m fullshard train   the same under torchrun
  fullshard generate runs/20260102-030405 --prompt "The "

exit codes: 0 well, 1 failed, 2 cannot be run as asked, 75 stopped by SIGTERM with a checkpoint (run it again to go
on), 130 interrupted by Ctrl-C, 143 by SIGTERM where there was nothing to save
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `train` or `generate` with `argv` (default: the process's own) and return the exit code."""
    top = argparse.ArgumentParser(prog="fullshard")
    add_commands(top.add_subparsers(dest="command", required=True, metavar="{train,generate}"))
    try:
        return run(top.parse_args(argv))
    except KeyboardInterrupt:
        print("fullshard: interrupted by SIGINT", file=sys.stderr)
        return 130


def run(arguments: argparse.Namespace) -> int:
    """Do what was asked and return the exit code."""
    try:
        return _train(arguments) if arguments.command == "train" else _generate(arguments)
    except ConfigError as error:
        # Under torchrun every rank finds the same mistake; one tells it.
        if str(error) and os.environ.get("RANK", "0") == "0":
            print(f"fullshard: {error}", file=sys.stderr, flush=True)
        return 2


def add_commands(commands: Any) -> None:
    """Add `train` and `generate` to the parser of the command line."""
    train = commands.add_parser(
        "train",
        help="train a model",
        description="Train a model; everything a run makes is in one fresh folder.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train.add_argument("config", nargs="?", type=Path, metavar="config.toml", help="keys that differ from the default")
    train.add_argument(
        "--set", action="append", default=[], metavar="section.key=value", help="change one key; repeatable"
    )
    train.add_argument(
        "--resume",
        nargs="?",
        const=_NEWEST,
        metavar="RUN",
        help="go on with the run in this folder, with its configuration (default: the newest unfinished one in runs/)",
    )
    train.add_argument("--nproc", type=int, metavar="N", help="processes (default: one per CUDA device, else 2)")
    train.add_argument("--print-config", action="store_true", help="print the resolved configuration and exit")

    generate = commands.add_parser("generate", help="generate text from the model of a run")
    generate.add_argument("run", type=Path, metavar="RUN", help="folder of a run that has ended well")
    generate.add_argument("--prompt", default=None, help="beginning of the text (default: sample.prompt of the run)")
    generate.add_argument("--tokens", type=_at_least_0, default=None, help="how many to generate (default: the run's)")
    generate.add_argument(
        "--temperature", type=float, default=None, help="0 = always the most likely (default: the run's)"
    )
    generate.add_argument(
        "--top-k",
        type=_at_least_0,
        default=None,
        help="among the k most likely, 0 = all (default: the run's)",
    )
    generate.add_argument("--seed", type=_at_least_0, default=0, help="another seed gives another text (default: 0)")


def _at_least_0(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value}: expected at least 0")
    return value


def _train(arguments: argparse.Namespace) -> int:
    from . import launch

    config = _config(arguments)
    inside = launch.joined_from_outside()
    if inside and not arguments.print_config:
        world = int(os.environ["WORLD_SIZE"])
        if arguments.nproc not in (None, world):
            raise ConfigError(
                f"--nproc {arguments.nproc}: already started as one of {world} processes; leave --nproc away"
            )
    else:
        world = launch.num_processes(config, arguments.nproc)
    config.check_world(world)
    if arguments.print_config:
        print(to_toml(config, notes=_automatic(config, world)), end="")
        return 0
    if inside:
        return _be_one_of(config)
    from .data import check_data
    from .folder import make_run_dir

    check_data(config.data)
    run_dir = make_run_dir(config)
    return launch.launch(config, run_dir, world)


def _config(arguments: argparse.Namespace) -> Config:
    if arguments.resume is None:
        return load_config(arguments.config, arguments.set)
    from .folder import is_run, newest_unfinished

    if arguments.config is not None:
        raise ConfigError("--resume takes the configuration of the run: leave config.toml away, change keys with --set")
    path = newest_unfinished() if arguments.resume is _NEWEST else Path(arguments.resume)
    if not is_run(path):
        raise ConfigError(f"--resume {path}: expected the folder of a run, with its config.toml")
    config = load_config(path / "config.toml", arguments.set)
    return replace(config, run=replace(config.run, dir=str(path)))


def _automatic(config: Config, world: int) -> dict[str, str]:
    """What the automatic values mean on this machine."""
    from . import launch

    notes = {
        "parallelism.data_parallel_shard_degree": config.parallelism.degrees(world)[1]
        if config.parallelism.data_parallel_shard_degree == -1
        else None,
        "training.device": launch.device_kind(config) if config.training.device == "auto" else None,
        "training.threads": None if config.training.threads else launch.threads_per_process(config, world),
        "training.micro_batch": _automatic_micro_batch(config, world),
        "model.ffn_dim": None if config.model.ffn_dim else config.ffn_dim,
    }
    return {key: f"here: {value}" for key, value in notes.items() if value is not None}


def _automatic_micro_batch(config: Config, world: int) -> str | int | None:
    found = config.micro_batch(world)
    if config.training.micro_batch == AUTO:
        return f"at most {found}"
    return found if found != config.training.micro_batch else None


def _be_one_of(config: Config) -> int:
    """The life of one process of a run."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    from . import launch
    from .process import Interrupted, Stopped, joined_world, leave, stop_on_signals

    run_dir: Path | None = None
    stop_on_signals()
    try:
        from .folder import sole_user
        from .run import agreed_run_dir, train

        with joined_world(config) as world:
            run_dir = agreed_run_dir(config, world)
            with sole_user(run_dir) if world.rank == 0 else nullcontext():
                train(config, world, run_dir)
        return 0
    except ConfigError as error:
        if run_dir is None or launch.RUN_DIR not in os.environ:
            raise
        get_error_handler().record_exception(error)  # the launcher tells it
        leave(launch.EXIT_USAGE)
    except Stopped as stop:
        if run_dir is not None and _speaks_for_the_run():
            print(f"fullshard: {stop}; the same command goes on", file=sys.stderr, flush=True)
        leave(launch.EXIT_STOPPED)
    except Interrupted as stop:
        if run_dir is not None and _speaks_for_the_run():
            launch.tell_end(run_dir, "interrupted", f"interrupted by {stop}")
        leave(stop.exit_code)
    except Exception as error:
        get_error_handler().record_exception(error)
        if launch.RUN_DIR not in os.environ:
            traceback.print_exc()
            if run_dir is not None and _speaks_for_the_run():
                launch.tell_end(run_dir, "failed", f"{type(error).__name__}: {error}")
        leave(launch.EXIT_FAILED)
    raise AssertionError("not reached: leave() ends the process")


def _speaks_for_the_run() -> bool:
    """Our launcher tells how its run ended; rank 0 does so where there is none, or none any more."""
    from . import launch

    alone = os.environ.get(launch.LAUNCHER_PID) != str(os.getppid())
    return alone and os.environ["RANK"] == "0"


def _generate(arguments: argparse.Namespace) -> int:
    import torch

    from .sample import generate, load_run

    try:
        model, tokenizer, config = load_run(arguments.run)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        raise ConfigError(str(error)) from None
    keys = config.sample
    temperature = keys.temperature if arguments.temperature is None else arguments.temperature
    if temperature < 0:
        raise ConfigError(f"--temperature {temperature}: expected at least 0; nearest valid: 0")
    text = generate(
        model,
        tokenizer,
        prompt=keys.prompt if arguments.prompt is None else arguments.prompt,
        num_tokens=keys.tokens if arguments.tokens is None else arguments.tokens,
        context=config.training.sequence_length,
        temperature=temperature,
        top_k=keys.top_k if arguments.top_k is None else arguments.top_k,
        seed=arguments.seed,
        device=torch.device("cpu"),
    )
    print(text)
    return 0
