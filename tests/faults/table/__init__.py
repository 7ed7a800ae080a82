"""The table: all cases of the matrix, a file for each class."""

from __future__ import annotations

from tests.faults.cases import Case
from tests.faults.table import (
    checkpoints,
    divergence,
    exceptions,
    forks,
    hand_over,
    initialisation,
    misuse,
    numbers,
    optimizers,
    outside,
    pending,
    processes,
    reported,
    signals,
    waits,
)

# Class -> what it is about, in the order of the documents.
CLASSES: dict[str, str] = {
    "init": "initialisation: how ranks begin",
    "exceptions": "exceptions: what a step raises, on all ranks and on one",
    "divergence": "divergence: ranks that do different things",
    "misuse": "autograd and API misuse",
    "numbers": "numbers: NaN, stale state, what must be equal",
    "processes": "processes: killed, stopped, slow",
    "optimizers": "optimizers: what ranks do to their shards, and the update inside of a guard",
    "outside": "outside: what no unit has, replicas, loads and initial values",
    "waits": "waits: first contacts, collective calls, settings, the limit",
    "signals": "signals that reach a rank while it waits",
    "forks": "forks, collected models, and who ends first",
    "reported": "reported: what people run into with FSDP2",
    "checkpoints": "checkpoints: saves and loads of several ranks",
    "hand_over": "hand-over: transfers, weights, averages, sleep, whole matrices on their owners",
}
# Cases whose outcome is not the demanded one, and what is missing. A test fails when one of them is right by now.
OPEN: dict[str, str] = dict.fromkeys(pending.OPEN, "one guard of what ranks do")
CASES: tuple[Case, ...] = (
    *initialisation.CASES,
    *exceptions.CASES,
    *divergence.CASES,
    *misuse.CASES,
    *numbers.CASES,
    *processes.CASES,
    *optimizers.CASES,
    *outside.CASES,
    *waits.CASES,
    *signals.CASES,
    *forks.CASES,
    *reported.CASES,
    *checkpoints.CASES,
    *hand_over.CASES,
)
