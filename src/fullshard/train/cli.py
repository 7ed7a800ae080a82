"""`fullshard train` and `fullshard generate`: their arguments and their work. Help needs no torch.

Exit codes: 0 success, 1 failure, or --from would lose something, 2 the command or the configuration cannot run, 75
stopped after a step by SIGTERM, with a checkpoint, 128 + n interrupted by signal n (130 for Ctrl-C).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import traceback
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullshard.train.config import AUTO, Config, ConfigError, load_config, to_toml

if TYPE_CHECKING:
    from fullshard.train.elsewhere import Taken

_NEWEST = object()

_EXAMPLES = """\
examples:
  fullshard train                                  two processes, the corpus inside Python, one to three minutes
  fullshard train my.toml --nproc 4                your own configuration on four processes
  fullshard train --set training.steps=50 --set data.corpus=path:book.txt
  fullshard train --print-config > my.toml         every key, its value and its meaning
  fullshard train --from accelerate.yaml           sharded as this says: Accelerate, HF, axolotl, TRL, Composer,
                                                   LLM Foundry, torchtitan, DeepSpeed; says first what became of keys
  fullshard train --resume runs/20260102-030405    continue from the newest checkpoint of a run
  torchrun --nproc-per-node 2 -m fullshard train   the same under torchrun
  fullshard generate runs/20260102-030405 --prompt "The "

exit codes: 0 success, 1 failed, or --from would lose something, 2 cannot run as requested, 75 stopped by SIGTERM with
a checkpoint (run it again to continue), 130 interrupted by Ctrl-C, 143 by SIGTERM when there was nothing to save
"""


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit code."""
    try:
        return _train(arguments) if arguments.command == "train" else _generate(arguments)
    except ConfigError as error:
        # Under torchrun every rank finds the same mistake; only one prints it.
        if str(error) and os.environ.get("RANK", "0") == "0":
            print(f"fullshard: {error}", file=sys.stderr, flush=True)
        return 2


def add_commands(commands: Any) -> None:
    """Add `train` and `generate` to the parser of the command line."""
    train = commands.add_parser(
        "train",
        help="train a model",
        description="Train a model; a run writes everything into one new folder.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train.add_argument("config", nargs="?", type=Path, metavar="config.toml", help="keys that differ from the default")
    train.add_argument(
        "--set", action="append", default=[], metavar="section.key=value", help="change one key; repeatable"
    )
    train.add_argument(
        "--model",
        metavar="FOLDER",
        help="train this model of Hugging Face, model.folder; adapters.method = lora or qlora trains adapters on it",
    )
    train.add_argument(
        "--resume",
        nargs="?",
        const=_NEWEST,
        metavar="RUN",
        help="continue the run in this folder with its configuration (default: the newest unfinished one in runs/)",
    )
    train.add_argument(
        "--from",
        dest="elsewhere",
        type=Path,
        metavar="FILE",
        help="shard as this configuration of another library says, or what `fullshard migrate` wrote from it",
    )
    train.add_argument(
        "--accept-lossy", action="append", default=[], metavar="KEY", help="of --from: train although this is lost"
    )
    train.add_argument("--nproc", type=int, metavar="N", help="processes (default: one per CUDA device, else 2)")
    train.add_argument(
        "--plan", action="store_true", help="print memory, messages and time of a step, predicted, before the first one"
    )
    train.add_argument("--print-config", action="store_true", help="print the resolved configuration and exit")

    generate = commands.add_parser("generate", help="generate text from the model of a run")
    generate.add_argument("run", type=Path, metavar="RUN", help="folder of a completed run")
    generate.add_argument("--prompt", default=None, help="beginning of the text (default: sample.prompt of the run)")
    generate.add_argument("--tokens", type=_at_least_0, default=None, help="how many to generate (default: the run's)")
    generate.add_argument(
        "--temperature", type=_temperature, default=None, help="0 = always the most likely (default: the run's)"
    )
    generate.add_argument(
        "--top-k", type=_at_least_0, default=None, help="among the k most likely, 0 = all (default: the run's)"
    )
    generate.add_argument("--seed", type=_at_least_0, default=0, help="another seed gives another text (default: 0)")


def _at_least_0(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value}: expected at least 0")
    return value


def _temperature(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: expected a finite number of at least 0")
    return value


def _train(arguments: argparse.Namespace) -> int:
    from fullshard.train import launch

    taken = _taken(arguments)
    if taken is not None and not _told(taken, arguments):
        return 1
    if arguments.model is not None:
        arguments.set.insert(0, f"model.folder={json.dumps(arguments.model)}")
    config = _config(arguments, {} if taken is None else taken.settings)
    inside = "RANK" in os.environ and "WORLD_SIZE" in os.environ  # one of several processes already: start no others
    if inside and not arguments.print_config:
        world = int(os.environ["WORLD_SIZE"])
        if arguments.nproc not in (None, world):
            raise ConfigError(
                f"--nproc {arguments.nproc}: already started as one of {world} processes; leave out --nproc"
            )
    else:
        world = launch.num_processes(config, arguments.nproc)
    config.check_world(world)
    if arguments.print_config:
        print(to_toml(config, notes=_automatic(config, world)), end="")
        return 0
    plan = None
    if arguments.plan and os.environ.get("RANK", "0") == "0":
        from fullshard.plan.result import table
        from fullshard.train.planned import compared, plan_here

        plan = plan_here(config, world)
        print(table(plan) + "\n", flush=True)
    if inside:
        return _be_one_of(config)
    from fullshard.train.data import check_data
    from fullshard.train.folder import make_run_dir

    check_data(config.data)
    if config.model.folder:
        from fullshard.train.pretrained import check_pretrained_folder

        check_pretrained_folder(config, world)
    run_dir = make_run_dir(config)
    code = launch.launch(config, run_dir, world)
    if plan is not None and code == 0:
        print(compared(plan, run_dir), flush=True)
    return code


def _taken(arguments: argparse.Namespace) -> Taken | None:
    """Returns what --from says. Raises `ConfigError`."""
    from fullshard.migrate.verdict import MigrationError
    from fullshard.train.elsewhere import take

    if arguments.elsewhere is None:
        if arguments.accept_lossy:
            raise ConfigError(f"--accept-lossy {arguments.accept_lossy[0]}: goes with --from, which is not there")
        return None
    if arguments.resume is not None:
        raise ConfigError("--resume uses the configuration of the run: leave out --from, change keys with --set")
    try:
        return take(arguments.elsewhere)
    except MigrationError as error:
        raise ConfigError(str(error)) from None


def _told(taken: Taken, arguments: argparse.Namespace) -> bool:
    """Print the verdicts, on one rank, and whether nothing is lost that was not accepted. Beside --print-config they
    are comments."""
    from fullshard.migrate.verdict import Judgement, MigrationError

    judged = Judgement(taken.findings, arguments.accept_lossy)
    try:
        judged.check_accepted()
    except MigrationError as error:
        raise ConfigError(str(error)) from None
    if os.environ.get("RANK", "0") == "0":
        before = "# " if arguments.print_config else ""
        print("\n".join(f"{before}{line}" for line in str(judged).splitlines()) + "\n", flush=True)
        if judged.refused:
            keys = " ".join(f"--accept-lossy {key}" for key in dict.fromkeys(each.key for each in judged.refused))
            print(f"fullshard: {arguments.elsewhere}: lost, or to be changed manually; {keys}", file=sys.stderr)
    return not judged.refused


def _config(arguments: argparse.Namespace, elsewhere: Mapping[str, Any]) -> Config:
    if arguments.resume is None:
        return load_config(arguments.config, arguments.set, elsewhere)
    from fullshard.train.folder import is_run, newest_unfinished

    if arguments.config is not None:
        raise ConfigError("--resume uses the configuration of the run: leave out config.toml, change keys with --set")
    path = newest_unfinished() if arguments.resume is _NEWEST else Path(arguments.resume)
    if not is_run(path):
        raise ConfigError(f"--resume {path}: expected the folder of a run, with its config.toml")
    config = load_config(path / "config.toml", arguments.set)
    return replace(config, run=replace(config.run, dir=str(path)))


def _automatic(config: Config, world: int) -> dict[str, str]:
    """The values of automatic settings on this machine."""
    from fullshard.train.process import device_kind, threads_per_process

    keys, size, notes = config.training, config.micro_batch(world), {}
    if config.sharding.sharding.data_parallel_shard_degree == -1:
        notes["sharding.data_parallel_shard_degree"] = str(config.sharding.degrees(world)[1])
    if keys.device == "auto":
        notes["training.device"] = device_kind(config)
    if not keys.threads:
        notes["training.threads"] = str(threads_per_process(config, world))
    if size != keys.micro_batch:
        notes["training.micro_batch"] = f"at most {size}" if keys.micro_batch == AUTO else str(size)
    if config.model.folder:
        notes |= {f"model.{key.name}": "the folder's" for key in fields(config.model)[2:]}
    elif not config.model.ffn_dim:
        notes["model.ffn_dim"] = str(config.ffn_dim)
    return {key: f"here: {value}" for key, value in notes.items()}


def _be_one_of(config: Config) -> int:
    """Run one process of a run."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    from fullshard.train import launch
    from fullshard.train.process import RUN_DIR, Interrupted, Stopped, joined_world, leave, stop_on_signals

    run_dir: Path | None = None
    launched = RUN_DIR in os.environ  # by our launcher, which reports how its run ends
    stop_on_signals()
    try:
        from fullshard.train.folder import sole_user
        from fullshard.train.run import agreed_run_dir, train

        with joined_world(config) as world:
            run_dir = agreed_run_dir(config, world)
            with sole_user(run_dir) if world.rank == 0 else nullcontext():
                train(config, world, run_dir)
        return 0
    except ConfigError as error:
        if run_dir is None or not launched:
            raise
        get_error_handler().record_exception(error)
        leave(launch.EXIT_USAGE)
    except Stopped as stop:
        if run_dir is not None and _speaks_for_the_run():
            print(f"fullshard: {stop}; run the same command to continue", file=sys.stderr, flush=True)
        leave(launch.EXIT_STOPPED)
    except Interrupted as stop:
        if run_dir is not None and _speaks_for_the_run():
            launch.say_end(run_dir, "interrupted", f"interrupted by {stop}")
        leave(stop.exit_code)
    except Exception as error:
        get_error_handler().record_exception(error)
        if not launched:
            traceback.print_exc()
            if run_dir is not None and _speaks_for_the_run():
                launch.say_end(run_dir, "failed", f"{type(error).__name__}: {error}")
        leave(launch.EXIT_FAILED)


def _speaks_for_the_run() -> bool:
    """Whether this process reports the end of the run: rank 0 does if our launcher never existed or is gone."""
    from fullshard.train.process import LAUNCHER_PID

    return os.environ.get(LAUNCHER_PID) != str(os.getppid()) and os.environ["RANK"] == "0"


def _generate(arguments: argparse.Namespace) -> int:
    from fullshard.train.sample import generate, load_run

    try:
        model, tokenizer, config = load_run(arguments.run)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        raise ConfigError(str(error)) from None
    given = {name: getattr(arguments, name) for name in ("prompt", "tokens", "temperature", "top_k")}
    keys = replace(config.sample, **{name: value for name, value in given.items() if value is not None})
    print(generate(model, tokenizer, keys, context=config.training.sequence_length, seed=arguments.seed))
    return 0
