"""`Recorder`: writes what the steps of a run did into a file for each rank, for `fullshard see`.

    with fullshard.observe.Recorder(model, "runs/mine/see", optimizer) as recorder:
        for step in range(1, steps + 1):
            recorder.begin(step)
            ...                                     forward, backward, optimizer step
            recorder.end(loss=loss.item(), norm=float(norm))

Every step has a line with its times and figures. A few of them are recorded in full: events, commands, messages and
bytes (see/record.py). What they cost, benchmarks/recorder.py measures.
"""

from __future__ import annotations

import math
import os
import platform
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns
from types import TracebackType
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .._torch import local_of
from .._version import __version__
from ..engine import Root, Unit, root_of
from ..engine.unit import module_units
from ..peers import mode
from ..policy.arguments import expect_module, expect_whole
from ..see import record
from .expected import hosts_of
from .rows import StepRows, units_of

# Where the steps of a root are recorded, for reports.
_folders: weakref.WeakKeyDictionary[Root, Path] = weakref.WeakKeyDictionary()


def recorded_in(root: Root) -> Path | None:
    """The folder in which a recorder keeps the steps of `root`, or None."""
    return _folders.get(root)


def first_and_every(first: int, every: int) -> Callable[[int], bool]:
    """Chooses the steps that are recorded in full: the first `first` of them, and then each one with a number that
    `every` divides (0: none).

    >>> [step for step in range(1, 301) if first_and_every(2, 100)(step)]
    [1, 2, 100, 200, 300]
    """
    expect_whole("first", first, 0)
    expect_whole("every", every, 0)
    return lambda step: step <= first or bool(every and step % every == 0)


class Recorder:
    """Records the steps of `model` on this rank into `folder`.

    optimizer: its state is counted, if given. in_full: whether a step is recorded in full, by its number; default: the
    first three and every hundredth. first_step: the number of the first step; a run that is continued gets files of its
    own. The folder is made if it is missing; files of sessions that began with this step or a later one are replaced.

    Raises `ValueError` if nothing in `model` is sharded, and `OSError` if the folder cannot be written. On a device the
    times of a step are read after a later step, once they are there; `close` waits for them. The thread that trains
    also records.
    """

    def __init__(
        self,
        model: nn.Module,
        folder: str | Path,
        optimizer: Optimizer | None = None,
        *,
        in_full: Callable[[int], bool] | None = None,
        first_step: int = 1,
    ) -> None:
        expect_module("model", model)
        if not module_units(model):
            raise ValueError("model: expected a module with sharded parts, found none; apply fully_shard first")
        self._model, self._optimizer = model, optimizer
        self._folder, self._first_step = Path(folder), first_step
        self._in_full = first_and_every(3, 100) if in_full is None else in_full
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO | None = None
        self._roots: list[Root] = []
        self._numbers: dict[Unit, int] = {}
        self._state: dict[int, int] = {}
        # The running step: its number, its begin and its rows.
        self._step, self._begin = 0, 0
        self._rows: StepRows | None = None
        # The steps whose times are not there yet.
        self._late: list[tuple[dict[str, Any], StepRows]] = []
        self._closed = self._failed = False

    def begin(self, step: int) -> None:
        """Step `step` begins. One that is still open has failed. Forms the root if no forward ran yet."""
        if self._closed:
            raise ValueError(f"step {step}: expected an open recorder, found one that was closed")
        if self._begin:
            self._end({}, "it did not end")
        full = self._in_full(step)
        if full or self._file is None:
            self._meet_roots()
        self._step = step
        if full:
            self._rows = StepRows(self._roots, self._numbers, self._state)
            self._rows.attach()
            self._begin = self._rows.begin
        else:
            self._begin = perf_counter_ns()

    def end(self, **figures: float | Tensor | None) -> None:
        """The step is over. `figures`: its loss, norm and whatever else has a number; null in the file if not finite.

        Give numbers that the program has already: a tensor on a device would have to be waited for."""
        if not self._begin:
            raise ValueError("end: expected a step to be open, found none; call begin(step) before it")
        self._end({name: _finite(value) for name, value in figures.items() if value is not None}, "")

    def note(self, what: str, text: str = "", *, seconds: float = 0.0) -> None:
        """Notes an event that took `seconds` and ended now: "checkpoint"."""
        if self._file is not None:
            took = round(seconds * 1e9)
            self._file.write(record.line({"note": [what, perf_counter_ns() - took, took, self._step, text]}))

    def close(self) -> None:
        """Write what is left, and the end."""
        if self._closed:
            return
        if self._begin:
            error = sys.exception()  # in `finally`
            self._end(
                {}, "the recorder was closed in it" if error is None else _words(error), aborted=error is not None
            )
        self._closed = True
        if self._file is not None:
            # After a failure the device may never come to the end of the step.
            self._write_late(wait=not self._failed)
            for fields, _ in self._late:
                self._write(fields)
            self._file.write(record.line({"ended": True}))
            self._file.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and self._begin:
            self._end({}, _words(error), aborted=True)
        self.close()

    # ---- steps ---------------------------------------------------------------------------------------------

    def _end(self, figures: dict[str, float | None], failed: str, *, aborted: bool = False) -> None:
        """`aborted`: by an exception that is on its way, so that what is held now is what was held then."""
        rows, self._rows = self._rows, None
        if rows is not None:
            rows.detach()
        end = perf_counter_ns()
        fields: dict[str, Any] = {"step": self._step, "begin": self._begin, "end": end, "figures": figures}
        self._begin = 0
        if failed:
            fields["failed"] = failed
            self._failed = True
        if aborted and self._numbers:
            state = _state_nbytes(self._numbers, self._optimizer)
            fields["held"] = StepRows(self._roots, self._numbers, state).held()
            fields["memory"] = _memory(next(iter(self._numbers)).device)
        if rows is None:
            self._write_late(wait=False)
            if self._late:
                self._late.append((fields, _NO_ROWS))
            else:
                self._write(fields)
            return
        if not any(self._state.values()):
            self._state.update(_state_nbytes(self._numbers, self._optimizer))
        self._late.append((fields, rows))
        self._write_late(wait=False)

    def _write_late(self, *, wait: bool) -> None:
        """Write the steps whose times are there, in order."""
        while self._late:
            fields, rows = self._late[0]
            if rows is not _NO_ROWS:
                if not rows.is_complete(wait=wait):
                    return
                fields["detail"] = rows.fields()
            self._write(fields)
            del self._late[0]

    def _write(self, fields: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.write(record.line(fields))

    # ---- header --------------------------------------------------------------------------------------------

    def _meet_roots(self) -> None:
        """Find the roots, which a first forward or other settings may have made anew; and write the header once."""
        roots: dict[Root, None] = {}
        for unit in module_units(self._model):
            roots[root_of(unit)] = None
        if list(roots) == self._roots:
            return
        units = units_of(self._model, list(roots))
        if self._roots and len(units) != len(self._numbers):
            raise RuntimeError(
                f"recorder: expected the {len(self._numbers)} units that it began with, found {len(units)}; record "
                f"another model with another recorder"
            )
        self._roots, self._numbers = list(roots), {unit: number for number, unit in enumerate(units)}
        for root in self._roots:
            _folders[root] = self._folder
        if self._file is not None:
            return
        rank, world = _place()
        first = self._roots[0]
        header = record.Header(
            rank=rank,
            world=world,
            first_step=self._first_step,
            versions={"fullshard": __version__, "torch": torch.__version__},
            device=_device(first.units[0].device),
            host=_host(),
            clock=(time.time_ns(), perf_counter_ns()),
            units=tuple(_unit(unit, name) for unit, name in units.items()),
            options={
                "prefetch_depth": first.run.prefetch_depth,
                "prefetch_nbytes": first.run.prefetch_nbytes,
                "reductions_in_flight": first.options.reductions_in_flight,
                "communication": first.options.communication,
                "between_hosts": _between_hosts(first),
                "guard": mode(),
                "threads": torch.get_num_threads(),
            },
        )
        for file in self._folder.glob("from*-rank*.jsonl"):
            begins, of_rank = record.parts_of(file.name)
            if begins > self._first_step or (begins == self._first_step and of_rank >= world):
                file.unlink(missing_ok=True)
        # Writes without a buffer: a line is whole in the file, or not there, whenever the process ends.
        self._file = (self._folder / record.file_name(self._first_step, rank)).open("wb", buffering=0)
        self._file.write(record.line(record.header_fields(header)))


_NO_ROWS: Any = object()


def _between_hosts(root: Root) -> str | None:
    """Returns the ways of messages between hosts; None where there is no choice."""
    hosts = hosts_of([("", unit) for unit in root.units], 0)
    return (hosts.ways or None) if hosts is not None else None


def _finite(value: float | Tensor | None) -> float | None:
    number = math.nan if value is None else float(value)
    return number if math.isfinite(number) else None


def _words(error: BaseException) -> str:
    """The first paragraph of an exception as one line, and its class.

    >>> _words(KeyError("head")), _words(FileNotFoundError(2, "No such file", "/data")), _words(TypeError())
    ('no key head (KeyError)', '/data: No such file (FileNotFoundError)', 'TypeError')
    """
    name = type(error).__name__
    text = " ".join(str(error).strip().split("\n\n")[0].split())
    if isinstance(error, KeyError) and error.args:
        text = f"no key {error.args[0]}"
    elif isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    return f"{text[:500]} ({name})" if text else name


def _memory(device: torch.device) -> dict[str, int]:
    """Bytes of the device's allocator and of the device, or of this process on a CPU."""
    if device.type == "cuda":
        try:
            free, total = torch.cuda.mem_get_info(device)
            used = {"allocated": torch.cuda.memory_allocated(device), "reserved": torch.cuda.memory_reserved(device)}
            return used | {"free": free, "total": total}
        except RuntimeError:  # the device is what failed; that exception is on its way
            return {}
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return {}
    return {"resident": pages * os.sysconf("SC_PAGE_SIZE")}


def _place() -> tuple[int, int]:
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return (torch.distributed.get_rank(), torch.distributed.get_world_size()) if there else (0, 1)


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _host() -> str:
    """Equal for processes that share a monotonic clock: those of one start of one machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def _unit(unit: Unit, name: str) -> record.Unit:
    dtypes = dict.fromkeys(
        " ".join(str(dtype).removeprefix("torch.") for dtype in (p.storage, p.compute, p.reduce))
        for p in (group.precision for group in unit.groups)
    )
    return record.Unit(
        name=name,
        module_class="+".join(type(module).__name__.removeprefix("FSDP") for module in unit.modules),
        numel=sum(group.pack.numel for group in unit.groups),
        local_numel=sum(group.flat.numel() for group in unit.groups),
        full_nbytes=unit.full_nbytes or 0,
        shard_nbytes=sum(group.flat.nbytes for group in unit.groups),
        dtypes=", ".join(dtypes),
        reshard_after_forward=unit.record.plan.reshard_after_forward,
    )


def _state_nbytes(numbers: dict[Unit, int], optimizer: Optimizer | None) -> dict[int, int]:
    """Bytes of the optimizer's state for each unit."""
    if optimizer is None:
        return {}
    found = {}
    for unit, number in numbers.items():
        states = [optimizer.state[param.sharded] for param in unit.params if param.sharded in optimizer.state]
        values = [v for state in states for v in state.values() if isinstance(v, Tensor)]
        values = [local_of(value) if isinstance(value, DTensor) else value for value in values]
        found[number] = sum(value.nbytes for value in values)
    return found
