"""Decides when to unshard, wait, reshard and reduce. Standard library only.

`record` (state of units and runs, prefetch order, gradient order), `events` (the vocabulary), `rules` (one function per
event), `optional` (units that only some ranks run), `check` (invariants of a command sequence).
"""

from .check import CommandChecker as CommandChecker
from .check import LifecycleError as LifecycleError
from .events import COMMANDS as COMMANDS
from .events import EVENTS as EVENTS
from .events import FLAGS as FLAGS
from .events import Command as Command
from .events import Event as Event
from .events import parse_command as parse_command
from .events import parse_event as parse_event
from .record import NOWHERE as NOWHERE
from .record import Full as Full
from .record import Owed as Owed
from .record import Phase as Phase
from .record import RunRecord as RunRecord
from .record import UnitRecord as UnitRecord
from .record import Use as Use
