"""The only room that calls a collective. Buffers in, buffers out: no parameters, no phases.

`group` (the messages), `blocks` (of few ranks), `nodes` (of several
nodes), `hierarchical` (reductions over these), `gather` and `reduce` (strategies over them), `reduction` (what these
make), `replicate` (what follows a sum), `pool` (the buffers), `custom` (messages by a caller's object), `agree` (small
messages by which ranks come to one answer), `broadcast` (tensors of one rank to all), `messages` (texts, on a group of
their own), `data_group` (process groups that can be cut when a peer failed).
"""

from .agree import agreed as agreed
from .agree import alike as alike
from .agree import joining_groups as joining_groups
from .agree import least_over as least_over
from .agree import sum_over as sum_over
from .agree import together_over as together_over
from .agree import told_by_one as told_by_one
from .blocks import block_of as block_of
from .broadcast import broadcast_over as broadcast_over
from .comparison import Comparison as Comparison
from .comparison import Digits as Digits
from .custom import CustomBuffers as CustomBuffers
from .custom import CustomGroup as CustomGroup
from .extension import ExtensionGather as ExtensionGather
from .gather import CastGather as CastGather
from .gather import GatherChannel as GatherChannel
from .gather import PlannedGather as PlannedGather
from .gather import SharedGather as SharedGather
from .group import Alone as Alone
from .group import Block as Block
from .group import Links as Links
from .group import NodeLinks as NodeLinks
from .group import ShardGroup as ShardGroup
from .group import all_reduce_over as all_reduce_over
from .group import attend as attend
from .group import mesh_links as mesh_links
from .group_memory import GroupMemoryGather as GroupMemoryGather
from .group_memory import GroupMemoryScatter as GroupMemoryScatter
from .hierarchical import partial_dtype as partial_dtype
from .messages import Messenger as Messenger
from .messages import alone as alone
from .messages import messenger as messenger
from .nodes import OnNodes as OnNodes
from .offload import HostLink as HostLink
from .offload import OffloadedGather as OffloadedGather
from .offload import OffloadedReduce as OffloadedReduce
from .pool import BufferPool as BufferPool
from .reduce import reduce_channel as reduce_channel
from .reduction import Dtypes as Dtypes
from .reduction import Hop as Hop
from .reduction import ReduceChannel as ReduceChannel
from .reduction import Reduction as Reduction
from .whole import whole_of as whole_of
