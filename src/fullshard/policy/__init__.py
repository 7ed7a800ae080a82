"""Options as frozen values: what the user may say, and what it resolves to. Read once, never looked up in a step."""

from .offload import CPUOffloadPolicy as CPUOffloadPolicy
from .offload import OffloadPolicy as OffloadPolicy
from .options import Options as Options
from .precision import MixedPrecisionPolicy as MixedPrecisionPolicy
from .precision import Precision as Precision
from .precision import resolve_precision as resolve_precision
