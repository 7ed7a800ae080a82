"""From what modules and autograd report to what is done: `hooks` (reports), `root` (report -> event -> rules ->
commands), `forming` (how a root comes to be), `executor` (commands -> tensors and messages), `unit` (one `fully_shard`
call), `channels` (what carries its groups), `watch` (weights read where no output gradient announced it), `tree`
(tensors in arguments and outputs).
"""

from .executor import Executor as Executor
from .root import Root as Root
from .root import root_of as root_of
from .unit import Part as Part
from .unit import Unit as Unit
from .unit import unit_of as unit_of
