"""Detects ranks that disagree or fail, and ends waits for them. Independent of units and checkpoints.

`watch` (one per process: signs of life and waits), `scope` (the ranks of a mesh: questions, failures, meetings), `wait`
(waiting, and the user's settings), `diagnosis` (why waits last, found by the rank that reads all records), `store`
(records and mail in the store), `process` (the state of a process), `failures` (exceptions, faults, losses on a
device; ranks as text). All but `watch` do without torch.
"""

from .failures import LOST as LOST
from .failures import Fault as Fault
from .failures import PeerFailed as PeerFailed
from .failures import RanksDisagree as RanksDisagree
from .failures import lost_in as lost_in
from .failures import shown_ranks as shown_ranks
from .failures import variants as variants
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
