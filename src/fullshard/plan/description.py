"""Describes a model as data, of which a plan is made: Its units and parameters, and the tape of one step of it.

    Tape     every operation of one forward and backward of the plain model on the meta device, in order, with the
    storages
             that came and went. It does not depend on ranks, strategy or hardware (`tape` writes it)
    Model    units, parameters, buffers, and the tape at one size of the micro-batch

Standard library only. Bytes are of one process.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import NamedTuple

# A use of no unit: the loss, and what runs before and after the model.
OUTSIDE = -1


class Kind(IntEnum):
    """The kinds of lines of a tape."""

    ENTER = 0  # a forward of a unit begins: `use` is its number; `a` is the unit
    EXIT = 1  # it ended
    OP = 2  # an operation ran: `a` floating-point operations, `b` bytes read and written, `name`
    ALLOCATE = 3  # a storage came: `a` is its number, `b` its bytes
    FREE = 4  # the storage `a` went
    BACKWARD = 5  # the backward of `use` begins; before this line no operation of its backward ran
    BACKWARD_END = 6  # the backward of `use` is over: no operation of it follows
    GRADS_READY = 7  # all gradients of the unit `a` are there
    LOSS = 8  # the backward begins
    REACHED = 9  # a gradient is about to reach an output of `use`, after its BACKWARD
    INPUTS_REACHED = 10  # the gradients of the inputs of `use` are complete; never, if none requires one
    WEIGHTS = 11  # of a stage that computes them apart: gradients of inputs are there, those of weights begin


# Of messages of divided layers, which torch dispatches as operations: what their names begin with.
MESSAGE = "_c10d_functional."
# The operation of a line that waits for an earlier message of its axis. Its `a`: how many were sent after that one.
WAIT = "wait"


class Line(NamedTuple):
    """One line of the tape; see `Kind`. `use` is the innermost use that it belongs to, or OUTSIDE. Of an operation that
    is a message (`MESSAGE`), `a` are the bytes of the whole tensor."""

    kind: Kind
    use: int
    a: int = 0
    b: int = 0
    name: str = ""


@dataclass(frozen=True, slots=True)
class Sent:
    """Messages of one kind of one rank along an axis: how many, and bytes, all together: along `tp` of the whole
    tensors, along `cp` and `ep` what leaves the rank."""

    operation: str
    count: int
    nbytes: float
    axis: str = "tp"

    @classmethod
    def named(cls, name: str, count: int, nbytes: float) -> Sent:
        """Messages that a line calls `name`: with the axis before it, if that is not `tp`."""
        axis, _, operation = name.rpartition(":")
        return cls(operation, count, nbytes, axis or "tp")

    def times(self, number: int) -> Sent:
        return replace(self, count=self.count * number, nbytes=self.nbytes * number)


# From how many rows or columns on a matrix is one of a vocabulary.
_VOCABULARY = 32_768


@dataclass(frozen=True, slots=True)
class Parameter:
    """`name`: in the model. `dtype`: of storage. `placed`: the dim it is cut along. `place`: in the order of
    `model.parameters()`. `kept`: it computes in its own dtype, whatever the strategy says.
    `shards`: over how many ranks it is cut, where that is not the strategy's number: experts; 0: the strategy's.
    `reached`: the step that was recorded gives it a gradient; optimizers have no state for others."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool = True
    placed: int = 0
    place: int = 0
    kept: bool = False
    shards: int = 0
    reached: bool = True

    @property
    def is_stepped(self) -> bool:
        """Whether an optimizer steps it."""
        return self.trainable and self.reached

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def is_matrix(self) -> bool:
        """Whether Muon steps it, by its shape and its name: `fullshard.extras.matrices` knows modules."""
        return len(self.shape) == 2 and max(self.shape) < _VOCABULARY and "embed" not in self.name


@dataclass(frozen=True, slots=True)
class UnitShape:
    """A module that is sharded by itself. `name`: dotted, "" is the model. `reshard`: what the call of `fully_shard`
    for this unit says about `reshard_after_forward`, None for nothing. `stage`: of a pipeline, whose root it may be."""

    name: str
    module_class: str
    parameters: tuple[Parameter, ...]
    reshard: bool | int | None = None
    stage: int | None = None

    @property
    def title(self) -> str:
        return self.name or ("root" if self.stage is None else f"root of stage {self.stage}")

    @property
    def numel(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)


@dataclass(frozen=True, slots=True)
class Tape:
    """`gradients`: the unit of each storage that became the gradient of a parameter. `inputs` and `outputs`: storages,
    of each use; among inputs those of the batch and of buffers too, with numbers below 0."""

    lines: tuple[Line, ...]
    gradients: dict[int, int]
    inputs: tuple[frozenset[int], ...]
    outputs: tuple[frozenset[int], ...]
    # The bytes of the batch, which the caller holds.
    batch_nbytes: int = 0
    # Tells for each storage how many operations ran before the one of the forward that reads it last.
    last_read: dict[int, int] = field(default_factory=dict)
    # The bytes of storages of the batch and of buffers, which stay.
    staying: dict[int, int] = field(default_factory=dict)
    # Gradients that ranks of `tp` add or put together after backward: (operation, elements of this rank's).
    brought: tuple[tuple[str, int], ...] = ()
    # The unit of each of these.
    brought_in: tuple[int, ...] = ()
    # Says what was assumed of values.
    assumed: tuple[str, ...] = ()


class Few(NamedTuple):
    """The blocks of the list `name` that a stage has: `number` of them, from number `first` on; and bytes of buffers
    that it has more than the one that was described."""

    name: str
    first: int
    number: int
    buffer_nbytes: int


class Stage(NamedTuple):
    """A stage of a pipeline, as a model of its own. `halves`: the same with gradients of inputs and of weights apart,
    None where no schedule needs it. `given_nbytes`, `made_nbytes`: bytes of what it gets from the stage before it for a
    micro-batch, and of what it gives to the next one; the last one's are those of the loss's input. `few`: the model is
    that of another stage that is alike, with other blocks, and perhaps another number of them (`repeats`)."""

    model: Model
    halves: Model | None
    given_nbytes: int
    made_nbytes: int
    few: Few | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """A model as data. `units`: the root first, then in the order of `model.modules()`; the root is there also without
    parameters of its own. `compute`: the dtype that the tape was recorded in, "" for that of the parameters. `samples`,
    `tokens`: of the micro-batch on the tape."""

    name: str
    units: tuple[UnitShape, ...]
    tape: Tape
    buffer_nbytes: int
    samples: int
    tokens: int
    compute: str = ""
    # The (sequence length, layers, width) of a decoder, for the operations that a model needs per token; None: unknown.
    attention: tuple[int, int, int] | None = None
    # The elements of parameters by which a token is multiplied, by the operations of the forward: of experts those that
    # it is sent to, of a table of embeddings none. 0: all elements. Of one rank of `tp`, as the width of attention.
    multiplied: float = 0.0
    # The elements of the parameters of all ranks of `tp` together; 0: as many as those of the units.
    undivided_numel: int = 0
    # The list of blocks of which this model has a few (`repeats`), and how many there are; None: it has all.
    cut: tuple[str, int] | None = None
    # The stages of a pipeline, whose units together are `units`. The tape is then that of no stage, and empty.
    stages: tuple[Stage, ...] = ()

    @property
    def numel(self) -> int:
        return sum(unit.numel for unit in self.units)

    def flop_per_token(self, parts: int = 1) -> float:
        """Operations that the model requires for a trained token, as `train.model.flop_per_token` and torchtitan count
        them: 6 per element that multiplies, and 12 (6 where causal attention is counted once) per layer, position and
        width. `parts`: over how many ranks each sequence is cut, of which this model has one part."""
        multiplied = 6.0 * (self.multiplied or self.numel)
        if self.attention is None:
            return multiplied
        length, layers, width = self.attention
        return multiplied + 6.0 * layers * length * parts * width
