"""Tools for the training loop on top of the engine's public surface and a few of its functions: micro-batches that fit,
optimizer steps in backward, one decision on NaN and inf, figures of gradients, uneven numbers of batches, replay of a
step, averages of parameters, weights for others, transfers between layouts, steps of whole matrices,
attention over sequences that are cut over ranks, and layers of experts.
"""

from ..agree import Drift as Drift
from ..agree import Turn as Turn
from ..api import Installation as Installation
from .average import Average as Average
from .average import average as average
from .check_gradients import GradientCheck as GradientCheck
from .check_gradients import NonFiniteError as NonFiniteError
from .check_gradients import check_gradients as check_gradients
from .context_parallel import ContextParallel as ContextParallel
from .context_parallel import context_parallel as context_parallel
from .experts import Experts as Experts
from .experts import MixtureOfExperts as MixtureOfExperts
from .experts import balance_loss as balance_loss
from .grad_stats import GradientFigures as GradientFigures
from .grad_stats import GradientStats as GradientStats
from .grad_stats import grad_stats as grad_stats
from .invariants import InvariantBroken as InvariantBroken
from .invariants import InvariantChecks as InvariantChecks
from .invariants import check_invariants as check_invariants
from .micro_batches import MicroBatches as MicroBatches
from .owners import StepOnOwners as StepOnOwners
from .owners import matrices as matrices
from .owners import step_on_owners as step_on_owners
from .replay import Replay as Replay
from .replay import ReplayError as ReplayError
from .replay import replay as replay
from .sleep import Slept as Slept
from .sleep import sleep as sleep
from .sleep import wake as wake
from .step_in_backward import StepInBackward as StepInBackward
from .step_in_backward import step_in_backward as step_in_backward
from .transfer import Transfer as Transfer
from .transfer import TransferError as TransferError
from .transfer import transfer as transfer
from .weights import WeightInfo as WeightInfo
from .weights import WeightPart as WeightPart
from .weights import Weights as Weights
from .weights import weights as weights
