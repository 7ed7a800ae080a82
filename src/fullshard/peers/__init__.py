"""Detects ranks that disagree or fail, and ends waits for them. Independent of units and checkpoints.

`watch` (one per process: signs of life and waits), `scope` (the ranks of a mesh: questions, failures, meetings), `wait`
(waiting, and the user's settings), `diagnosis` (why waits last, found by the rank that reads all records), `store`
(records and mail in the store), `process` (the state of a process), `failures` (exceptions, faults, losses on a
device), `order` (the order of messages), `facts` (what must be equal on all ranks). All but `watch` do without torch.
"""

from .facts import Difference as Difference
from .facts import Item as Item
from .facts import dumps_items as dumps_items
from .facts import first_difference as first_difference
from .facts import loads_items as loads_items
from .facts import shown_ranks as shown_ranks
from .facts import variants as variants
from .failures import LOST as LOST
from .failures import Fault as Fault
from .failures import PeerFailed as PeerFailed
from .failures import RanksDisagree as RanksDisagree
from .failures import lost_in as lost_in
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
from .scope import had_losses as had_losses
from .scope import loss_over as loss_over
from .scope import same_on_all as same_on_all
from .scope import tell as tell
from .wait import Settings as Settings
from .wait import Wait as Wait
from .wait import wait_until as wait_until
from .watch import Watch as Watch
from .watch import is_current as is_current
from .watch import mode as mode
from .watch import scope_of as scope_of
from .watch import watch as watch
