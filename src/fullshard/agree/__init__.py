"""Compares what must be equal on all ranks, and lets all of them reach one outcome when it is not, or when one of them
fails. Above the engine, which knows it only by `engine/seam.py`.

`companion` (accompanies a root), `ledger` (statements with one digest, and the order of messages), `differences` (where
ranks differ, and the text of the error), `structure` (a root: units, parameters, initial values, buffers),
`mesh_ledger` (a root on one mesh, and its messages), `calls` (of optimizers and other callers), `recovery` (failures,
meetings, steps since a load), `guarded_steps` (`guard`: blocks that complete on all ranks or on none), `joined` (ranks
with different numbers of batches), `equal_rows` (shards that were drawn with one seed).
"""

from .companion import accompany as accompany
from .companion import loaded as loaded
from .guarded_steps import guard as guard
from .joined import Turn as Turn
from .joined import joined as joined
from .recovery import mark_restored as mark_restored
from .structure import Drift as Drift
from .structure import find_drift as find_drift
