"""Runs in each process: the trainings of all settings, one after the other, and their records as files.

folder/before/        what was there before the first step; `rank-0.pt` also holds every full parameter
folder/step-0/        what one step used and made: losses, generators and buffers of each rank; full gradients,
                      parameters and optimizer state by rank 0
folder/exercised/     what was done beside steps
folder/checkpoint/    of the state after the last step
folder/elsewhere/     what another number of ranks loaded of it
"""

from __future__ import annotations

import importlib
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from fullshard.program import Program, find_program

from .exercises import during, exercise, load_elsewhere
from .kernels import control
from .setting import Setting
from .subject import Training

Task = Callable[[Program, Setting, torch.device, Path], object]


def train(program: Program, setting: Setting, device: torch.device, folder: Path) -> None:
    """One setting."""
    rank = dist.get_rank()
    with during("computing the plain model, before it is sharded"):
        of_plain_model = control(program, setting, device, setting.data_rank(rank))
    training = Training(program, setting, device)
    write(folder / "before", rank, training.before(of_plain_model))
    for step in range(setting.steps):
        write(folder / f"step-{step}", rank, training.step(step))
    if setting.exercises:
        write(folder / "exercised", rank, exercise(training, folder))


def train_elsewhere(program: Program, setting: Setting, device: torch.device, folder: Path) -> None:
    """Load what `train` saved in `folder`; `setting` is of another world."""
    write(folder / "elsewhere", dist.get_rank(), load_elsewhere(Training(program, setting, device), folder))


def run_rank(settings: list[Setting], folders: list[str], uses_numpy: bool, task: Task = train) -> None:
    """One rank of several settings, one after the other; writes their records. torchrun's environment names the rank.
    `uses_numpy`: the program does, at the latest in its first forward."""
    if uses_numpy:
        importlib.import_module("numpy")  # to be seeded before that
    kind = settings[0].device
    device = torch.device("cpu")
    if kind != "cpu":
        device = torch.device(kind, int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device.index)
    dist.init_process_group(dist.get_default_backend_for_device(device))
    rank, name = dist.get_rank(), task.__name__
    try:
        for setting, folder in zip(settings, folders, strict=True):
            try:
                task(find_program(setting.entry), setting, device, Path(folder))
            except BaseException as error:
                notes = "".join(f"{note}: " for note in getattr(error, "__notes__", ()) if "\n" not in note)
                text = f"{notes}{type(error).__name__}: {error}\n{traceback.format_exc()}"
                Path(folder, f"{name}-failed-{rank}.txt").write_text(text)
                raise
            Path(folder, f"{name}-done-{rank}").touch()
    finally:
        dist.destroy_process_group()


def write(folder: Path, rank: int, record: NamedTuple) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(tuple(record), folder / f"rank-{rank}.pt")
