"""Detects ranks that disagree or fail, and ends waits for them. Independent of units and checkpoints.

`watch` (one per process: signs of life and waits), `scope` (the ranks of a mesh: questions, failures, meetings), `wait`
(exceptions, faults, losses on a device, waits, and the user's settings), `diagnosis` (why waits last, found by the rank
that reads all records), `store` (records and mail in the store; the state of a process). All but `watch` do without
torch.
"""

from .scope import Scope as Scope
from .scope import ask as ask
from .scope import had_losses as had_losses
from .scope import loss_over as loss_over
from .scope import same_on_all as same_on_all
from .scope import tell as tell
from .store import node as node
from .wait import LOST as LOST
from .wait import Fault as Fault
from .wait import PeerFailed as PeerFailed
from .wait import RanksDisagree as RanksDisagree
from .wait import Settings as Settings
from .wait import Wait as Wait
from .wait import lost_in as lost_in
from .wait import shown_ranks as shown_ranks
from .wait import silent_store as silent_store
from .wait import variants as variants
from .wait import wait_until as wait_until
from .watch import Watch as Watch
from .watch import is_current as is_current
from .watch import mode as mode
from .watch import scope_of as scope_of
from .watch import watch as watch
