"""Options as frozen values: what the user may say, and what it resolves to. Read once, never looked up in a step."""

from .mesh_dims import DataParallelMeshDims as DataParallelMeshDims
from .offload import CPUOffloadPolicy as CPUOffloadPolicy
from .offload import Offload as Offload
from .offload import OffloadPolicy as OffloadPolicy
from .offload import resolve_offload as resolve_offload
from .options import Options as Options
from .precision import MixedPrecisionPolicy as MixedPrecisionPolicy
from .precision import Precision as Precision
from .precision import resolve_precision as resolve_precision
from .reduction import Controls as Controls
from .reduction import CustomComm as CustomComm
from .reduction import Scale as Scale
from .reduction import resolve_scale as resolve_scale
