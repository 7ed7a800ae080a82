"""Diagnostics without effect on results: `trace` (events and commands as text), `report` (units and bytes), `recorder`
(what steps did, in a file for `fullshard see`)."""

from .expected import Bytes as Bytes
from .recorder import Recorder as Recorder
from .recorder import first_and_every as first_and_every
from .report import Report as Report
from .report import UnitInfo as UnitInfo
from .report import UnitReport as UnitReport
from .report import Unsharded as Unsharded
from .report import inspect_units as inspect_units
from .report import report as report
from .trace import Trace as Trace
from .trace import record as record
