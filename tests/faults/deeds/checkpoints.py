"""What the cases of checkpoints do; all ranks of a case share the folder of its reports."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint import save as dcp_save

from fullshard import checkpoint
from tests.faults.actions import Action, local
from tests.faults.program import Run


def where(run: Run, name: str = "saved") -> Path:
    assert run.told is not None
    return run.told.folder / name


def state_of(run: Run) -> dict[str, Any]:
    model, optimizer = checkpoint.get_state_dict(run.model, run.optimizer)
    return {"model": model, "optimizer": optimizer, "step": run.step}


def _save(run: Run, state: dict[str, Any], name: str, **options: Any) -> None:
    if run.ours:
        checkpoint.save(state, checkpoint_id=where(run, name), **options)
    elif not run.plain:
        dcp_save({"model": run.model.state_dict()}, checkpoint_id=where(run, name))


def save(run: Run) -> None:
    _save(run, state_of(run), "saved")


def save_to(name: str) -> Action:
    return lambda run: _save(run, state_of(run), name)


def save_by_rank(run: Run) -> None:
    """Each rank to a folder of its own, as a path made of the rank, or of the time, has it."""
    _save(run, state_of(run), f"saved{run.rank}")


def save_with(**values: Any) -> Action:
    """More in the state."""
    return lambda run: _save(run, {**state_of(run), **values}, "saved")


def save_alone(run: Run) -> None:
    """Without the others: no_dist."""
    state = {"step": run.step, "rank": run.rank}
    if run.ours:
        checkpoint.save(state, checkpoint_id=where(run, f"alone{run.rank}"), no_dist=True)


def save_without_the_others(run: Run) -> None:
    """What the others save together, this rank saves by itself."""
    _save(run, {"step": run.step}, "alone", no_dist=True)


def save_in_group(run: Run) -> None:
    """Over a process group of all ranks, made for it."""
    group = dist.new_group()
    _save(run, state_of(run), "saved", process_group=group)
    dist.destroy_process_group(group)


def save_what_cannot_be(run: Run) -> None:
    _save(run, {**state_of(run), "lock": sys.stdout}, "saved")


def begin(run: Run) -> None:
    """An asynchronous save."""
    if run.ours:
        run.kept["future"] = checkpoint.async_save(state_of(run), checkpoint_id=where(run))


def finish(run: Run) -> None:
    if run.ours:
        run.kept["future"].result()


def begin_and_finish(run: Run) -> None:
    begin(run)
    finish(run)


def _load(run: Run, name: str, **options: Any) -> None:
    if run.ours:
        state = state_of(run)
        checkpoint.load(state, checkpoint_id=where(run, name), **options)
        checkpoint.set_state_dict(
            run.model, run.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
    elif not run.plain:
        dcp_load({"model": run.model.state_dict()}, checkpoint_id=where(run, name))


def load(run: Run) -> None:
    _load(run, "saved")


def load_from(name: str) -> Action:
    return lambda run: _load(run, name)


def load_by_rank(run: Run) -> None:
    """Each rank from another checkpoint, of which both are whole."""
    _load(run, "first" if run.rank == 0 else "second")


def load_on_its_own(run: Run) -> None:
    """A checkpoint of plain values, by this process alone."""
    if run.ours:
        state = {"step": -1, "rank": -1}
        checkpoint.load(state, checkpoint_id=where(run, f"alone{run.rank}"), no_dist=True)
        assert state["rank"] == run.rank, state


def save_moved(name: str) -> Action:
    """Other values than those that are trained: what another run left."""

    def action(run: Run) -> None:
        with torch.no_grad():
            for p in run.model.parameters():
                local(p).mul_(0.5)
        _save(run, state_of(run), name)
        with torch.no_grad():
            for p in run.model.parameters():
                local(p).mul_(2.0)

    return action


def load_alone_by_rank(run: Run) -> None:
    """The same, without the others: each rank reads its rows from a checkpoint of its own."""
    _load(run, "first" if run.rank == 0 else "second", no_dist=True)


def load_alone(run: Run) -> None:
    _load(run, "first", no_dist=True)


def save_on_a_full_disk(run: Run) -> None:
    """Rank 1 may write no file of more than some bytes meanwhile."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if run.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        save(run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def not_writable(run: Run) -> None:
    """The path is a file on which no checkpoint can be."""
    where(run).write_text("not a folder")


def look(run: Run) -> None:
    """What one rank may do by itself."""
    if run.ours:
        assert checkpoint.is_complete(where(run))
        checkpoint.inspect(where(run))
        checkpoint.verify(where(run))


def take_state(run: Run) -> None:
    run.kept["state"] = state_of(run)


def leave(run: Run) -> None:
    sys.exit(0)
