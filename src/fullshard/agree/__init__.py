"""What must be equal on all ranks, and what they do when it is not, or when one of them fails. Above the engine, which
knows it only by `engine/seam.py`.

`companion` (accompanies a root), `structure` (what a root is: units, parameters, initial values, buffers), `order` and
`actions` (the order of messages), `ledger` (what ranks state, and where they differ), `step_facts` and
`optimizer_facts` (what is entered and when it is compared), `recovery` (failures, meetings, steps since a load),
`guard` and `guarded_steps` (blocks that complete on all ranks or on none), `joined` (ranks with different numbers of
batches), `equal_rows` (shards that were drawn with one seed).
"""

from .companion import accompany as accompany
from .companion import loaded as loaded
from .guard import guard as guard
from .guard import mark_restored as mark_restored
from .joined import Turn as Turn
from .joined import joined as joined
from .structure import Drift as Drift
from .structure import find_drift as find_drift
