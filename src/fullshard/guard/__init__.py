"""Detects ranks that disagree or fail, and ends waits for them. Independent of units and checkpoints.

`watch` (one per process: signs of life and waits), `current` (the watch of the current process group), `scope` (the
ranks of a mesh: questions, failures, meetings), `wait` (waiting, and the user's settings), `leader` (the rank that
reads all records), `diagnosis` (why waits last), `store` (records in the store), `process` (the state of a process),
`errors` (faults and exceptions), `order` (the order of messages, pure), `facts` (changes of shards, pure), `structure`
(the structure of a model, pure), `loss` (what an abort on a device spoils, pure).
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
from .loss import LOST as LOST
from .loss import had_losses as had_losses
from .loss import loss_over as loss_over
from .loss import lost_in as lost_in
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
