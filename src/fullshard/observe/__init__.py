"""Diagnostics: `trace` (events and commands as text), `report` (units and bytes). Has no effect on results."""

from .expected import Bytes as Bytes
from .report import Report as Report
from .report import UnitInfo as UnitInfo
from .report import UnitReport as UnitReport
from .report import Unsharded as Unsharded
from .report import inspect_units as inspect_units
from .report import report as report
from .trace import Trace as Trace
from .trace import record as record
