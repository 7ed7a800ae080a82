"""The table: all cases of the matrix, a file for each class."""

from __future__ import annotations

from tests.faults.cases import Case
from tests.faults.table import exceptions, misuse

# Class -> what it is about, in the order of the documents.
CLASSES: dict[str, str] = {
    "init": "initialisation: how ranks begin",
    "exceptions": "exceptions: what a step raises, on all ranks and on one",
    "divergence": "divergence: ranks that do different things",
    "misuse": "autograd and API misuse",
    "numbers": "numbers: NaN, stale state, what must be equal",
    "processes": "processes: killed, stopped, slow",
}
CASES: tuple[Case, ...] = (*exceptions.CASES, *misuse.CASES)
