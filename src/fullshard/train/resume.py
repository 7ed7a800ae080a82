"""Checkpoints of a run, and how a later run goes on from one.

```
run folder/checkpoints/step-50    model, AdamW, step, data, schedule: all that the steps after it depend on
```

The order of samples is a function of (seed, step), random numbers of (seed, step, rank), the learning rate of the step:
so a run that goes on from step 50 does what the undisturbed one did, bit for bit on as many processes, and on any other
number with the same samples.
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import MicroBatches, checkpoint
from .config import CheckpointKeys
from .process import World

FOLDER = "checkpoints"


class Checkpoints:
    """Those of one run, as each rank has them."""

    def __init__(
        self,
        run_dir: Path,
        keys: CheckpointKeys,
        world: World,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        facts: dict[str, Any],
        micro: MicroBatches | None = None,
    ) -> None:
        self.folder, self.keys, self.world = run_dir / FOLDER, keys, world
        self.model, self.optimizer = model, optimizer
        self.facts = facts  # what must be the same when the run goes on: the corpus, the seed
        self.micro = micro
        self._under_way: Future[str] | None = None

    def newest(self) -> Path | None:
        """The newest whole checkpoint, by its step; what a save left that did not come to its end is passed over. Rank
        0 looks, and tells the others."""
        found = checkpoint.latest(self.folder) if self.world.rank == 0 else None
        (step,) = self.world.largest([-1.0 if found is None else float(found.name.removeprefix("step-"))])
        return self.folder / f"step-{step:.0f}" if step >= 0 else None

    def load(self, path: Path) -> int:
        """Bring model and optimizer to where they were, and return the step. Collective.

        Raises `CheckpointError`, and `RuntimeError` where the run was another one; then nothing has changed.
        """
        model_state, optimizer_state = checkpoint.get_state_dict(self.model, self.optimizer)
        found = checkpoint.inspect(path)
        held = {key.removeprefix("run."): entry.value for key, entry in found.values.items() if key.startswith("run.")}
        wrong = [
            f"{key}: {held.get(key)!r} there, {value!r} here"
            for key, value in self.facts.items()
            if held.get(key) != value
        ]
        if wrong:
            raise RuntimeError(f"{path} is of another run: {'; '.join(wrong)}. Use the same data, or another run.dir")
        run = {**self.facts, "step": 0, "world": 0}
        if "micro_batch" in held:  # not in those of older runs
            run["micro_batch"] = 0
        state = {"model": model_state, "optimizer": optimizer_state, "run": run}
        checkpoint.load(state, checkpoint_id=path)
        checkpoint.set_state_dict(
            self.model, self.optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state
        )
        size = run.get("micro_batch", 0)
        if self.micro is not None and self.micro.search != "fixed" and size:
            self.micro.load_state_dict({"size": size, "fits": 0, "fails": 0})
        step = run["step"]
        assert isinstance(step, int)
        return step

    def due(self, step: int, last: int) -> bool:
        """Whether a checkpoint is made after `step` of `last`."""
        return step == last or bool(self.keys.every and step % self.keys.every == 0)

    def save(self, step: int, *, wait: bool) -> None:
        """Make the checkpoint of `step`, and let old ones go. Collective. With `wait` it is whole when this returns;
        without it may be written beside the next steps, and a failure is raised by the save after it."""
        self._settle()
        path = self.folder / f"step-{step}"
        model_state, optimizer_state = checkpoint.get_state_dict(self.model, self.optimizer)
        # What was found by failing, so that nobody has to fail again; 0: it was given.
        found = self.micro.size or 0 if self.micro is not None and self.micro.search != "fixed" else 0
        run = {**self.facts, "step": step, "world": self.world.size, "micro_batch": found}
        state = {"model": model_state, "optimizer": optimizer_state, "run": run}
        if self.keys.asynchronous and not wait:
            self._under_way = checkpoint.async_save(state, checkpoint_id=path)
            return
        checkpoint.save(state, checkpoint_id=path)
        self._retain()

    def _settle(self) -> None:
        """Wait for the save that is under way."""
        if self._under_way is not None:
            pending, self._under_way = self._under_way, None
            pending.result()
            self._retain()

    def _retain(self) -> None:
        if self.world.rank == 0:
            checkpoint.retain(self.folder, keep_last=self.keys.keep_last, keep_every=self.keys.keep_every or None)
