"""What happened and what there is, for people: `trace` (events and commands as text). Removing it changes no result."""

from .trace import Trace as Trace
from .trace import record as record
