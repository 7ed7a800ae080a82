"""`verify`: train each setting sharded, in processes of their own, and compare it with the reference."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fullshard.migrate import ConfigError
from fullshard.migrate.declared import declare
from fullshard.program import Program, ProgramError, find_program

from .applicable import Applicable
from .comparison import Comparison, Result
from .exercised import FullComparison
from .experiments import Experiments
from .pipelined import check_pipeline
from .processes import Task, run_rank, train, train_elsewhere
from .setting import Setting, seed_generators
from .strategy import Strategy, norms_of
from .subject import torch_has_overrides


def verify(
    entry: str,
    strategies: Sequence[Strategy],
    *,
    world: int = 2,
    steps: int = 3,
    libraries: Sequence[str] = ("fullshard",),
    device: str = "cpu",
    steps_only: bool = False,
    tell: Callable[[str], object] = lambda _: None,
) -> list[Result]:
    """Compare sharded training of the program `entry` with plain training; one result for each library and strategy.

    device: "cpu"; "auto" or a type such as "cuda": one device for each process.
    steps_only: leave out what is done beside steps: clipping, evaluation, loading and the rest of `exercises.py`.
    world: processes, all on this machine; a multiple of the numbers after `hsdp` and `tp`.
    tell: called with a line of text at each stage.

    Writes 24 bytes for each parameter and step to the temporary folder of the system, and removes them. Where
    something differs, it trains again up to seven times, for the cause. Raises `ProgramError` for a program that plain
    torch cannot train, for devices that are not there, and if a signal stops it; `ValueError` for a strategy that does
    not fit `world`.
    """
    try:
        return _results(entry, strategies, world, steps, libraries, device, steps_only, tell)
    except SignalException as error:  # torch's launcher raises it for as long as this process lives
        raise ProgramError(f"stopped by {signal.Signals(error.sigval).name}") from error


def _results(
    entry: str,
    strategies: Sequence[Strategy],
    world: int,
    steps: int,
    libraries: Sequence[str],
    device: str,
    steps_only: bool,
    tell: Callable[[str], object],
) -> list[Result]:
    device = _kind(device, world)
    program = find_program(entry)
    _try(program, entry)
    settings = [Setting(entry, library, s, world, steps, device) for library in libraries for s in strategies]
    for strategy in strategies:
        strategy.shards(world)
        if "torch" in libraries and (strategy.context > 1 or strategy.experts > 1 or strategy.pipeline > 1):
            raise ProgramError(f"{strategy}: expected fullshard alone beside cp, ep and pp; leave --against torch out")
        if strategy.divides:
            _check_division(program, strategy, world)
    if any(strategy.norms for strategy in strategies):
        if not norms_of(program.model()):
            raise ProgramError("norms: expected a model with norms of torch, found none; leave the word out")
        if "torch" in libraries and not torch_has_overrides():
            raise ProgramError("norms: expected torch 2.15, whose FSDP2 has param_dtype_override_fn; leave torch out")
    applicable = Applicable(program, _reference_device(device), _other_world(device, world))
    reasons: list[dict[str, str]] = []
    for i, setting in enumerate(settings if not steps_only else ()):
        exercises, why = applicable.exercises(setting)
        settings[i] = setting._replace(exercises=exercises)
        reasons.append(why)
    results: list[Result] = []
    with_torch = {"fullshard", "torch"} <= {*libraries}
    compared: dict[tuple[str, Strategy], Comparison] = {}
    with tempfile.TemporaryDirectory(prefix="fullshard-verify-") as folder:
        jobs = {setting: Path(folder, str(i)) for i, setting in enumerate(settings)}
        failures = _trained(jobs, world, train, Path(folder), tell)
        elsewhere = {s: path for s, path in jobs.items() if "another world" in s.exercises and s not in failures}
        if elsewhere:
            assert applicable.ranks is not None
            failures |= _trained(elsewhere, applicable.ranks, train_elsewhere, Path(folder), tell)

        def again(jobs: dict[Setting, Path]) -> dict[Setting, str]:
            failed: dict[Setting, str] = {}
            for world in {setting.world: None for setting in jobs}:
                alike = {setting: path for setting, path in jobs.items() if setting.world == world}
                failed |= _trained(alike, world, train, Path(folder), lambda _: None)
            return failed

        for i, (setting, records) in enumerate(jobs.items()):
            if setting in failures:
                results.append(Result(setting, failure=failures[setting]))
                continue
            tell(f"comparing {setting.name}")
            comparison: Comparison = FullComparison(program, setting, records, _reference_device(device))
            comparison.result.not_exercised = reasons[i] if reasons else {"all": "with --steps-only"}
            result = comparison.run()
            if result.difference is not None and setting.strategy.pipeline == 1:
                tell("training it again with one thing changed at a time, for the cause")
                experiments = Experiments(program, setting, _reference_device(device), again)
                result.difference = experiments.explained(result.difference)
            results.append(result)
            if with_torch:
                compared[setting.library, setting.strategy] = comparison
        for (library, strategy), comparison in compared.items():
            if library == "fullshard" and (other := compared.get(("torch", strategy))) is not None:
                comparison.take_beside(other.folder)
    return results


def _trained(
    jobs: dict[Setting, Path], world: int, task: Task, folder: Path, tell: Callable[[str], object]
) -> dict[Setting, str]:
    """Do `task` for each setting, with its records in its folder; by setting, why it failed."""
    left, failures, name = dict(jobs), dict[Setting, str](), task.__name__
    elsewhere = task is train_elsewhere
    while left:
        for made in left.values():
            made.mkdir(exist_ok=True)
        doing = f"loading {len(left)} checkpoint(s)" if elsewhere else f"training {len(left)} setting(s)"
        tell(f"{doing} on {world} processes")
        settings = [s._replace(world=world, strategy=Strategy(), steps=0) if elsewhere else s for s in left]
        ended = _launch(settings, [*left.values()], folder, task)
        for setting, records in tuple(left.items()):
            del left[setting]
            failed = sorted(records.glob(f"{name}-failed-*.txt"))
            if failed or len(list(records.glob(f"{name}-done-*"))) < world:
                failures[setting] = _told(failed, ended)
                break  # the processes ended there: the rest is started anew
    return failures


def _other_world(device: str, world: int) -> int | None:
    """How many processes load what `world` saved; None if there are not enough devices."""
    if device == "cpu" or torch.accelerator.device_count() > world:
        return world + 1
    return world - 1 or None


def _kind(device: str, world: int) -> str:
    """The type of the devices to train on. Raises `ProgramError` if there are not enough of them."""
    accelerator = torch.accelerator.current_accelerator()
    if device == "cpu" or (device == "auto" and accelerator is None):
        return "cpu"
    here = accelerator.type if accelerator is not None else ""
    count = torch.accelerator.device_count() if device in ("auto", here) else 0
    if count < world:
        raise ProgramError(
            f"device {device}: expected one for each of {world} processes, found {count} on this machine; ask for "
            f"fewer processes, or for the device cpu"
        )
    return here


def _try(program: Program, entry: str) -> None:
    """One forward and backward of the plain model, and its `shard` without sharding, before any process is started."""
    doing = "the plain model cannot take a step with batch 0"
    try:
        seed_generators(0)
        model = program.model()
        loss = program.loss(model, program.batch(0))
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ProgramError(f"{entry}: expected a loss of one element, found {what}")
        loss.backward()
        doing = "shard cannot be applied to the model"
        given: list[dict[str, Any]] = []
        program.shard(program.model(), lambda module, **options: given.append(options))
    except ProgramError:
        raise
    except (Exception, SystemExit) as error:
        text = (str(error).strip().splitlines() or [""])[0]
        raise ProgramError(f"{entry}: {doing}: {type(error).__name__}: {text}") from error
    if not given:
        raise ProgramError(f"{entry}: expected shard to call the fully_shard that it is given, found no call")
    if any("mp_policy" in options for options in given):
        raise ProgramError(
            f"{entry}: expected the strategy to choose the precision, which the plain model must follow, found "
            f"mp_policy among the options that shard passes; leave it out, and ask for zero3+bf16"
        )


def _check_division(program: Program, strategy: Strategy, world: int) -> None:
    """Raise `ProgramError` if the model cannot be divided as `strategy` says."""
    if strategy.pipeline > 1:
        check_pipeline(program, strategy, world)
        return
    if program.parallelize is not None and strategy.tensor > 1:
        if strategy.sequence or strategy.loss:
            problem = "expected the styles of the model, which sp and lp change, found a division of its own"
            raise ProgramError(f"{strategy}: {problem}; leave the words out, or that")
        return
    try:
        declare(program.model(), strategy.parallelism, world)
    except ConfigError as error:
        raise ProgramError(f"{strategy}: {error}") from error


def _reference_device(device: str) -> torch.device:
    return torch.device(device, 0) if device != "cpu" else torch.device("cpu")


def _launch(settings: list[Setting], folders: list[Path], folder: Path, task: Task) -> str:
    """Train all of them; how the first process ended that a signal killed, or ""."""
    world = settings[0].world
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        log = logging.getLogger(name)
        log.addHandler(logging.NullHandler())
        log.propagate = False
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // world, 1)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=str(folder / f"rendezvous-{uuid.uuid4().hex}"),
        rdzv_configs={"store_type": "file"},
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
        logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
    )
    try:
        elastic_launch(config, run_rank)(settings, [str(each) for each in folders], "numpy" in sys.modules, task)
    except ChildFailedError as error:
        # SIGTERM is the agent's, for those that were left.
        killed = [(f.timestamp, rank, -f.exitcode) for rank, f in error.failures.items() if f.exitcode < 0]
        for _, rank, number in sorted(k for k in killed if k[2] != signal.SIGTERM):
            why = " (out of memory?)" if number == signal.SIGKILL else ""
            return f"rank {rank} was killed by {signal.Signals(number).name}{why}"
    return ""


# Of an exception that only says that a peer is gone.
_LOST_PEER = ("PeerFailed", "onnection closed", "onnection reset", "onnection refused")


def _told(failed: list[Path], ended: str) -> str:
    """Why the processes ended, in a line: an exception of a rank that did not only lose its peers, or `ended` (see
    `_launch`)."""
    lines = [path.read_text().splitlines()[0] for path in failed]
    causes = [line for line in lines if not any(sign in line for sign in _LOST_PEER)]
    return next(filter(None, [*causes, ended, *lines]), "a process ended without a word")


def is_verified(results: Sequence[Result]) -> int:
    """The exit code: 0 equal, 1 different, 2 something could not run."""
    if any(result.failure for result in results):
        return 2
    return int(any(result.difference is not None for result in results))


def say(text: str) -> None:
    """A line of progress."""
    print(f"fullshard verify: {text}", file=sys.stderr, flush=True)
