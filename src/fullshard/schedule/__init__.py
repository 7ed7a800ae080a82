"""When to gather, wait, free and reduce: pure decisions. Standard library only.

Read `state` (what is known of a unit), `events` (the vocabulary), `rules` (one function per event), `prefetch` (which
unit is next), `sending` (in which order gradients are sent), `check` (invariants of a command sequence), `order` (the
order of messages on which ranks agreed).
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
from .record import Phase as Phase
from .record import RunRecord as RunRecord
from .record import UnitRecord as UnitRecord
from .record import Use as Use
