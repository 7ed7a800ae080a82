"""Looks at the machine, the model and its wrapping before a launch.

facts       what was looked at, as data
machine     of this machine and the checkpoints' folder | model: of the model, plain and sharded over a fake group
steps       what steps of both show | fingerprints: by which batches and models are compared
probe       short measurements: a step, messages between processes
calibration the rates of this machine, for `fullshard plan`
checks      the table of checks: facts -> what is wrong
diagnosis   the findings as a table and as JSON
examine     collects the facts
"""

from .checks import CHECKS as CHECKS
from .diagnosis import Diagnosis as Diagnosis
from .diagnosis import Finding as Finding
from .examine import examine as examine
