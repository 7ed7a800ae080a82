"""The only subpackage that calls collectives. It handles buffers, never parameters or phases.

`group` (process groups and their collectives), `gather` and `reduce` (how parameters and gradients travel), `choice`
(which way messages take), `rates` (measured, for that), `pool` (buffers of messages),
`comparison` (digests compared between ranks), `messages` (texts and small sums), `offload` (shards on the host),
`data_group` (groups that can be cut when a peer fails),
`exchange` (parts of tensors from one layout to another one), `owner_line` (whole matrices to
their owners, and back), `sequence` (attention over sequences cut over ranks), `experts` (tokens to
experts that ranks divide, and back).
"""

from .choice import Locations as Locations
from .choice import direct_of as direct_of
from .choice import located as located
from .choice import reduce_channel as reduce_channel
from .comparison import Comparison as Comparison
from .comparison import HostCopy as HostCopy
from .comparison import alike as alike
from .data_group import DataGroup as DataGroup
from .data_group import Sent as Sent
from .data_group import communicators as communicators
from .exchange import Exchange as Exchange
from .exchange import OwnParts as OwnParts
from .exchange import Ranks as Ranks
from .exchange import gathered as gathered
from .exchange import problems_of as problems_of
from .exchange import ranks_of as ranks_of
from .exchange import texts_of as texts_of
from .experts import ExpertLine as ExpertLine
from .experts import TokenRoute as TokenRoute
from .gather import CastGather as CastGather
from .gather import CustomBuffers as CustomBuffers
from .gather import CustomGroup as CustomGroup
from .gather import ExtensionGather as ExtensionGather
from .gather import GatherChannel as GatherChannel
from .gather import GroupMemory as GroupMemory
from .gather import PlannedGather as PlannedGather
from .group import Alone as Alone
from .group import Block as Block
from .group import Links as Links
from .group import ShardGroup as ShardGroup
from .group import attend as attend
from .group import block_of as block_of
from .group import mesh_links as mesh_links
from .messages import Messenger as Messenger
from .messages import all_reduce_over as all_reduce_over
from .messages import alone as alone
from .messages import broadcast_over as broadcast_over
from .messages import exchanged_over as exchanged_over
from .messages import joining_groups as joining_groups
from .messages import largest_over as largest_over
from .messages import least_over as least_over
from .messages import messenger as messenger
from .messages import sum_over as sum_over
from .messages import together_over as together_over
from .messages import told_by_one as told_by_one
from .messages import whole_of as whole_of
from .offload import HostLink as HostLink
from .offload import Landing as Landing
from .offload import OffloadedGather as OffloadedGather
from .offload import settle_uploads as settle_uploads
from .offload import uploading as uploading
from .owner_line import OwnerLine as OwnerLine
from .owner_line import owner_ranks as owner_ranks
from .pool import BufferPool as BufferPool
from .rates import known_rates as known_rates
from .reduce import Dtypes as Dtypes
from .reduce import Outgoing as Outgoing
from .reduce import Parts as Parts
from .reduce import ReduceChannel as ReduceChannel
from .reduce import Reduction as Reduction
from .sequence import SequenceLine as SequenceLine
