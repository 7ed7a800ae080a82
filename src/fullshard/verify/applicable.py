"""Decides which exercises a setting can do, and why it cannot do the others: tried with the plain model, before any
process is started."""

from __future__ import annotations

from typing import Any

import torch

from fullshard.program import Program

from .exercises import OF_TORCH
from .reference import Reference
from .setting import EXERCISES, Setting


class Applicable:
    """The exercises of one program on one device; what was tried once is not tried again for another setting."""

    def __init__(self, program: Program, device: torch.device, ranks: int | None) -> None:
        """`ranks`: the number of another world, None if there are no devices for one."""
        self.program, self.device, self.ranks = program, device, ranks
        self._tried: dict[Any, str] = {}

    def exercises(self, setting: Setting) -> tuple[tuple[str, ...], dict[str, str]]:
        """Returns those that apply, in order, and by name why another does not."""
        if not setting.is_fsdp2:
            return (), {"all": f"not under {setting.library}"}
        reasons: dict[str, str] = {}
        if setting.library == "torch":
            reasons = {name: "with fullshard alone" for name in EXERCISES if name not in OF_TORCH}
            if setting.strategy.divides:
                reasons["clipping"] = "torch's takes no gradients on several meshes"
        if self.ranks is None:
            reasons.setdefault("another world", "there are no devices for another number of processes")
        strategy = setting.strategy
        if strategy.context > 1:
            # A forward outside of the context, or with batches that are not split.
            reasons |= {name: "of whole sequences" for name in ("evaluation", "output_dtype", "full_params")}
        if strategy.pipeline > 1:
            reasons |= {name: "of whole models" for name in EXERCISES if name != "clipping"}
        key = strategy.precision, strategy.pure, strategy.norms, strategy.recompute
        for name, trial in {"evaluation": self._evaluates, "output_dtype": self._casts}.items():
            if name not in reasons:
                if (name, key) not in self._tried:
                    self._tried[name, key] = trial(setting)
                if why := self._tried[name, key]:
                    reasons[name] = why
        return tuple(name for name in EXERCISES if name not in reasons), reasons

    def _evaluates(self, setting: Setting) -> str:
        """Why the plain model cannot, or ""; a forward and backward after it included."""
        reference = Reference(self.program, setting, self.device)
        for mode in ("no_grad", "inference_mode"):
            try:
                reference.evaluate(reference.computing, mode, 0)
                reference.forward(0, 0, 0)
            except Exception as error:
                return f"the plain model raises under {mode}: {_line(error)}"
        return ""

    def _casts(self, setting: Setting) -> str:
        model, shards = self.program.model(), []
        self.program.shard(model, lambda module, **_: shards.append(module))
        if not any(module is model for module in shards):
            return "shard does not call fully_shard with the whole model"
        try:
            Reference(self.program, setting, self.device, setting.output_dtype).forward(0, 0, 0)
        except Exception as error:
            return f"the plain model raises with outputs in {setting.output_dtype}: {_line(error)}"
        return ""


def _line(error: Exception) -> str:
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}"
