"""The runtime: module and autograd hooks in, collectives and tensors out.

`hooks` reports events, `root` turns them into commands by the rules of `schedule`, and `executor` runs the commands.
`unit` is one `fully_shard` call, `channels` has what carries its param groups, `backward` watches saved weights.
"""

from .executor import Executor as Executor
from .root import Root as Root
from .root import root_of as root_of
from .unit import Part as Part
from .unit import Unit as Unit
from .unit import unit_of as unit_of
