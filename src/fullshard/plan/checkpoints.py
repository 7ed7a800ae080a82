"""How long a checkpoint takes, and how often one should be saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from .machine import Hardware
from .strategy import Strategy, Unit


@dataclass(frozen=True)
class Checkpoints:
    """Seconds to save and to load; the best time between two of them (Young 1974, Daly 2006); the time between
    failures."""

    save: float
    load: float
    young: float
    daly: float
    between_failures: float


def checkpoints_of(units: Sequence[Unit], strategy: Strategy, hardware: Hardware, failure_hours: float) -> Checkpoints:
    """Each rank writes its shards and its state; of replicas, one writes. The interval that loses the least time, for a
    save of d seconds and M seconds between failures of the job: sqrt(2 d M) (Young), and Daly's higher order."""
    nbytes = sum(g.memory.shard_nbytes + g.state_nbytes for unit in units for g in unit.groups)
    save = nbytes / hardware.storage
    between = failure_hours * 3600 / strategy.ranks
    young = sqrt(2 * save * between)
    part = save / (2 * between)
    daly = young * (1 + sqrt(part) / 3 + part / 9) - save if save < 2 * between else between
    return Checkpoints(save, save, young, daly, between)
