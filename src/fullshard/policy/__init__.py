"""User options as frozen values, and what they resolve to. Read once, never looked up in a step."""

from .options import Controls as Controls
from .options import CustomComm as CustomComm
from .options import DataParallelMeshDims as DataParallelMeshDims
from .options import Options as Options
from .options import Scale as Scale
from .options import resolve_scale as resolve_scale
from .options import use_options as use_options
from .policies import CPUOffloadPolicy as CPUOffloadPolicy
from .policies import MixedPrecisionPolicy as MixedPrecisionPolicy
from .policies import Offload as Offload
from .policies import OffloadPolicy as OffloadPolicy
from .policies import Precision as Precision
from .policies import Wanted as Wanted
from .policies import resolve_offload as resolve_offload
from .policies import resolve_precision as resolve_precision
from .policies import wanted_of as wanted_of
