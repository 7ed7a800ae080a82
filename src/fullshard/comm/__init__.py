"""The only room that calls a collective. Buffers in, buffers out: no parameters, no phases.

`group` (the messages), `gather` and `reduce` (strategies over them), `pool` (the buffers), `agree` (small messages by
which ranks come to one answer).
"""

from .agree import agreed as agreed
from .agree import sum_over as sum_over
from .gather import CastGather as CastGather
from .gather import GatherChannel as GatherChannel
from .gather import PlannedGather as PlannedGather
from .gather import SharedGather as SharedGather
from .group import Links as Links
from .group import ShardGroup as ShardGroup
from .group import all_reduce_over as all_reduce_over
from .offload import HostLink as HostLink
from .offload import OffloadedGather as OffloadedGather
from .offload import OffloadedReduce as OffloadedReduce
from .pool import BufferPool as BufferPool
from .reduce import Dtypes as Dtypes
from .reduce import ReduceChannel as ReduceChannel
from .reduce import Reduction as Reduction
from .reduce import reduce_channel as reduce_channel
