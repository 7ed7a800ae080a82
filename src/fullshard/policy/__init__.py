"""User options as frozen values, and what they resolve to. Read once, never looked up in a step."""

from .options import Controls as Controls
from .options import CPUOffloadPolicy as CPUOffloadPolicy
from .options import CustomComm as CustomComm
from .options import DataParallelMeshDims as DataParallelMeshDims
from .options import MixedPrecisionPolicy as MixedPrecisionPolicy
from .options import Offload as Offload
from .options import OffloadPolicy as OffloadPolicy
from .options import Options as Options
from .options import Precision as Precision
from .options import Scale as Scale
from .options import Wanted as Wanted
from .options import resolve_offload as resolve_offload
from .options import resolve_precision as resolve_precision
from .options import resolve_scale as resolve_scale
from .options import use_options as use_options
from .options import wanted_of as wanted_of
