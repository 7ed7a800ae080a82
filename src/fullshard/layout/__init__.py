"""Pure arithmetic of sharding: one parameter, one unit, and bytes.

Standard library only: it imports where torch is not installed. Files: `dtypes` (bytes per element), `shard`
(one parameter), `pack` (one unit), `chunks` (its gradients in messages), `gather` (direct or packed), `narrow` (what is
kept between forward and backward), `nodes` (reductions in two hops), `memory` (expected bytes), `budget` (what fits
into so many), `structure` (what a model is, as a list that ranks compare).
"""

from .budget import Candidate as Candidate
from .budget import choose_resident as choose_resident
from .budget import leading_within as leading_within
from .chunks import FACTS_NUMEL as FACTS_NUMEL
from .chunks import ReduceLayout as ReduceLayout
from .dtypes import itemsize as itemsize
from .dtypes import known_dtypes as known_dtypes
from .gather import GatherPlan as GatherPlan
from .gather import Span as Span
from .gather import direct_gradients as direct_gradients
from .gather import direct_indices as direct_indices
from .gather import groups_messages as groups_messages
from .gather import joins_exchanges as joins_exchanges
from .gather import launches as launches
from .gather import plan_gather as plan_gather
from .gather import sends_directly as sends_directly
from .gather import sends_in_pairs as sends_in_pairs
from .memory import backward_terms as backward_terms
from .memory import buffer_terms as buffer_terms
from .memory import forward_terms as forward_terms
from .memory import narrowing_terms as narrowing_terms
from .memory import peak as peak
from .memory import sending_terms as sending_terms
from .memory import shard_terms as shard_terms
from .memory import total as total
from .narrow import narrow_pack as narrow_pack
from .nodes import NodeGrid as NodeGrid
from .nodes import node_grid as node_grid
from .nodes import reduces_in_hops as reduces_in_hops
from .pack import Pack as Pack
from .pack import Segment as Segment
from .pack import align_numel as align_numel
from .pack import align_up as align_up
from .shard import Piece as Piece
from .shard import ShardLayout as ShardLayout
from .shard import contiguous_stride as contiguous_stride
from .unit_memory import Term as Term
from .unit_memory import UnitMemory as UnitMemory
