from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as Wrapper

KINDS = nn.Module
