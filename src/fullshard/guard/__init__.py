"""Ranks agree on what they do, failures have names, waits end. Knows neither units nor checkpoints.

`watch` (one for a process: signs of life, waits, who finds out), `current` (that of the process group of now, and its
end), `scope` (the ranks of a mesh: questions, failures, meetings), `wait` (the one way to wait), `diagnosis` (why waits
last), `store` (what stands in the store), `process` (what can be seen of one from outside), `fault` and `errors` (what
is told and raised), `order` (the order of messages, pure), `facts` (what a rank did to its shards, pure), `structure`
(what a model is, pure), `question` (questions about long texts), `settings` (what users choose).
"""

from . import structure as structure
from .current import has_peers as has_peers
from .current import is_current as is_current
from .current import mode as mode
from .current import scope_of as scope_of
from .current import watch as watch
from .errors import Fault as Fault
from .errors import PeerFailed as PeerFailed
from .errors import RanksDisagree as RanksDisagree
from .order import Action as Action
from .order import Order as Order
from .order import Question as Question
from .order import deviation as deviation
from .order import disagreement as disagreement
from .order import parse_action as parse_action
from .order import parse_question as parse_question
from .process import node as node
from .scope import Scope as Scope
from .scope import ask as ask
from .scope import same_on_all as same_on_all
from .scope import tell as tell
from .structure import Difference as Difference
from .structure import Item as Item
from .structure import first_difference as first_difference
from .structure import shown_ranks as shown_ranks
from .structure import variants as variants
from .wait import Settings as Settings
from .wait import Wait as Wait
from .wait import wait_until as wait_until
from .watch import Watch as Watch
