"""`examine`: look at everything, then let the checks read it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from fullshard.migrate.parallelism import Parallelism
from fullshard.program import Program, ProgramError

from . import machine, model, probe
from .diagnosis import Diagnosis, diagnose
from .facts import Facts, Measured, Model


def examine(
    program: Program,
    *,
    world: int = 2,
    replicas: int = 1,
    options: dict[str, Any] | None = None,
    checkpoints: str | Path | None = None,
    copies: int = 2,
    needs_port: bool = True,
    probes: bool = True,
    parallelism: Parallelism | None = None,
) -> Diagnosis:
    """Look at this machine and at `program`, as it would be sharded over `world` ranks in `replicas` groups.

    options: of `fully_shard`, such as `mp_policy`. checkpoints: their folder or URL, for `copies` of them.
    parallelism: the declaration of all axes; its copies go before `replicas`.
    probes: take steps of the plain model, and send messages between `world` processes, if that many can run here.

    This process must have no process group. Raises `ProgramError` for a model that cannot be built and a world that
    `replicas` does not divide.
    """
    if parallelism is not None:
        if parallelism.data_parallel_replicate_degree != -1:
            replicas = parallelism.data_parallel_replicate_degree
    elif world % replicas:
        raise ProgramError(f"{replicas} replicas: expected a number that divides the {world} ranks")
    here = machine.look(needs_port=needs_port)
    seen, measured = model.look(program, world, replicas, options or {}, steps=probes, plan=parallelism)
    if probes and parallelism is not None and parallelism.beyond_data:
        skipped = (*measured.skipped, "bandwidth (of axes beside data parallelism)")
        measured = replace(measured, skipped=skipped)
    elif probes:
        measured = _with_axes(measured, world, replicas, _message(seen), here.cores)
    folder = None if checkpoints is None else machine.look_at_folder(checkpoints, copies * _state(seen, replicas))
    return diagnose(Facts(world, replicas, here, seen, folder, measured))


def _with_axes(measured: Measured, world: int, replicas: int, nbytes: int, cores: int) -> Measured:
    most = max(cores, 2)
    if world == 1 or world > most:
        why = "one process" if world == 1 else f"{world} processes, and this machine has {cores} cores"
        return replace(measured, skipped=(*measured.skipped, f"bandwidth ({why})"))
    try:
        return replace(measured, axes=probe.measure(world, replicas, nbytes))
    except Exception as error:
        lines = str(error).strip().splitlines()
        return replace(measured, failure=lines[-1] if lines else type(error).__name__)


def _message(seen: Model) -> int:
    """Bytes of the largest gathered unit."""
    units = seen.report.units if seen.report else ()
    return max((unit.padded_local_numel * unit.world * unit.compute_itemsize for unit in units), default=0)


def _state(seen: Model, replicas: int) -> int:
    """Bytes of a checkpoint: parameters and optimizer state of all shards, once."""
    if seen.report is None:
        return 0
    each = seen.report.expected
    ranks = max((unit.world for unit in seen.report.units), default=1)
    return (each.parameters + (each.optimizer or 0)) * ranks
