"""The tensors of parameters: shards, full parameters, gradients, and which of them is on the modules.

`sharded` (one parameter: its DTensor spec, owner and tensors), `gradients` (on their way), `pending` (what stands for
those not reduced yet), `group` (parameters that travel together), `swap` (module slots, and the memory of full
parameters), `initial` (digests of values that ranks compare), `unwritten` (memory that nobody has written yet),
`extension` (tensors with their own all-gather), `held` (where the parts of any tensor are).
"""

from .extension import ExtensionGroup as ExtensionGroup
from .extension import extended_since as extended_since
from .extension import set_apart as set_apart
from .group import DtypeChanged as DtypeChanged
from .group import ParamGroup as ParamGroup
from .group import SecondaryGroup as SecondaryGroup
from .held import Layouts as Layouts
from .held import Place as Place
from .held import as_text as as_text
from .held import dtype_named as dtype_named
from .held import from_text as from_text
from .held import held_by as held_by
from .held import place_of as place_of
from .held import places_of as places_of
from .initial import are_written as are_written
from .initial import can_digest as can_digest
from .initial import digest as digest
from .initial import full_digests as full_digests
from .initial import note_initial as note_initial
from .initial import note_loaded as note_loaded
from .initial import numbers_of as numbers_of
from .initial import written_before as written_before
from .pending import PendingGrad as PendingGrad
from .pending import SteppedGrad as SteppedGrad
from .sharded import FullMesh as FullMesh
from .sharded import KeptGradients as KeptGradients
from .sharded import KeptTensor as KeptTensor
from .sharded import NormMesh as NormMesh
from .sharded import Owner as Owner
from .sharded import Placing as Placing
from .sharded import ShardedParam as ShardedParam
from .sharded import Spec as Spec
from .sharded import check_extension as check_extension
from .sharded import check_own_mesh as check_own_mesh
from .sharded import claim as claim
from .sharded import full_of as full_of
from .sharded import has_extension as has_extension
from .sharded import holds_bits as holds_bits
from .sharded import local_data as local_data
from .sharded import local_part as local_part
from .swap import Found as Found
from .swap import OwnedMemory as OwnedMemory
from .swap import Slot as Slot
from .swap import managed_modules as managed_modules
from .swap import managed_parameters as managed_parameters
from .swap import move_unsharded as move_unsharded
from .unwritten import are_poisoned as are_poisoned
from .unwritten import fingerprints as fingerprints
from .unwritten import is_poisoned as is_poisoned
from .unwritten import poison as poison
