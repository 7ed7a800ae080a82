"""Pure arithmetic of sharding: one parameter, one unit, and bytes.

Standard library only, so it imports without torch. Files: `shard` (one parameter, and one unit; bytes per element),
`gather` (messages: direct or packed gathers, gradients; bytes of one unit, and what fits into a number of bytes),
`levels` and `hosts` (ranks of several nodes; what each sends),
`boxes` (parts of tensors), `names` and `routes` (what goes from one layout to another one), `owners` (which rank steps
which whole matrix), `sequence` (sequences cut over ranks, and what attention sends).
"""

from .boxes import Box as Box
from .boxes import Cut as Cut
from .boxes import cutting_order as cutting_order
from .boxes import local_box as local_box
from .boxes import overlap as overlap
from .boxes import positions as positions
from .boxes import spans as spans
from .boxes import whole as whole
from .gather import FACTS_NUMEL as FACTS_NUMEL
from .gather import Candidate as Candidate
from .gather import GatherPlan as GatherPlan
from .gather import ReduceLayout as ReduceLayout
from .gather import Term as Term
from .gather import UnitMemory as UnitMemory
from .gather import choose_resident as choose_resident
from .gather import direct_gradients as direct_gradients
from .gather import direct_indices as direct_indices
from .gather import exchanges_gradients as exchanges_gradients
from .gather import groups_messages as groups_messages
from .gather import leading_within as leading_within
from .gather import plan_gather as plan_gather
from .gather import sends_in_pairs as sends_in_pairs
from .gather import total as total
from .hosts import HostGroups as HostGroups
from .hosts import on_hosts as on_hosts
from .levels import ONE_LEVEL as ONE_LEVEL
from .levels import TWO_LEVELS as TWO_LEVELS
from .levels import Levels as Levels
from .levels import Rates as Rates
from .levels import Share as Share
from .levels import Ways as Ways
from .levels import crossing as crossing
from .levels import fastest as fastest
from .levels import levels_of as levels_of
from .levels import staying as staying
from .names import Link as Link
from .names import Names as Names
from .names import rename as rename
from .owners import FleetPlan as FleetPlan
from .owners import Matrix as Matrix
from .owners import OwnersPlan as OwnersPlan
from .owners import newton_schulz_flops as newton_schulz_flops
from .routes import Cutting as Cutting
from .routes import Held as Held
from .routes import Parts as Parts
from .routes import Portion as Portion
from .routes import Route as Route
from .routes import TransferPlan as TransferPlan
from .routes import spread as spread
from .sequence import AttentionShape as AttentionShape
from .sequence import SequenceSplit as SequenceSplit
from .sequence import Traffic as Traffic
from .sequence import Visible as Visible
from .sequence import nearest_degrees as nearest_degrees
from .sequence import repeats as repeats
from .sequence import ring_traffic as ring_traffic
from .sequence import ulysses_traffic as ulysses_traffic
from .shard import FlatLayout as FlatLayout
from .shard import Piece as Piece
from .shard import Segment as Segment
from .shard import ShardLayout as ShardLayout
from .shard import align_numel as align_numel
from .shard import align_up as align_up
from .shard import contiguous_stride as contiguous_stride
from .shard import itemsize as itemsize
from .shard import known_dtypes as known_dtypes
from .shard import secondary_layout as secondary_layout
