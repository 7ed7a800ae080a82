"""A loss under `torch.compile`: what its kernels hold and move.

Inductor fuses casts, softmax and sums. One kernel reads the logits and writes a number for each token; in backward one
reads them again and writes their gradient, in their dtype. Nothing else is as large. So have Dao-AILab/quack#48 ("~0
for just fwd and ~d_input for fw+bw") and pytorch/torchtitan#1033 measured it.
"""

from __future__ import annotations

from collections.abc import Sequence

from .description import MESSAGE, OUTSIDE, Kind, Line, Tape
from .recomputation import is_matmul

FUSED = "fused loss"


def with_compiled_loss(tape: Tape, lines: Sequence[Line]) -> list[Line]:
    """`lines` of `tape`, whose loss is compiled. Raises `ValueError` for a loss that has products of its own, and where
    the model computes it itself."""
    begins = next(i for i, line in enumerate(lines) if line.kind is Kind.LOSS)
    leaves = max(i for i, line in enumerate(lines[:begins]) if line.kind is Kind.EXIT)
    enters = next(i for i, line in enumerate(lines) if line.kind is Kind.BACKWARD)
    own = [line for line in lines[leaves:enters] if line.use == OUTSIDE]
    if products := [line.name for line in own if line.kind is Kind.OP and is_matmul(line.name)]:
        raise ValueError(f"compiled_loss: expected a loss of pointwise operations and sums, found {products[0]}")
    given = tape.outputs[lines[leaves].use]
    sizes = {line.a: line.b for line in lines[:leaves] if line.kind is Kind.ALLOCATE and line.a in given}
    logits = max(sizes, key=lambda number: sizes[number], default=-1)
    # What is smaller is one number for each token, or few.
    large = [line.a for line in own if line.kind is Kind.ALLOCATE and line.b >= sizes.get(logits, 0)]
    if logits < 0 or not large:
        raise ValueError("compiled_loss: expected a loss outside of the model, found none: compile the model")
    gone, gradient = set(large[:-1]), large[-1]
    out = list(lines[: leaves + 1])
    for place, line in enumerate(lines[leaves + 1 : enters], leaves + 1):
        if line.kind in (Kind.ALLOCATE, Kind.FREE) and (line.a in gone or line == Line(Kind.FREE, line.use, logits)):
            continue
        if line.kind is Kind.OP and line.use == OUTSIDE and not line.name.startswith(MESSAGE):
            continue
        if place == begins:
            out.append(Line(Kind.OP, OUTSIDE, 0, sizes[logits], FUSED))
        out.append(line)
        if line == Line(Kind.ALLOCATE, OUTSIDE, gradient, line.b):
            out.append(Line(Kind.OP, OUTSIDE, 0, sizes[logits] + line.b, FUSED))
    # The logits stay until their gradient is there.
    if any(line.kind is Kind.FREE and line.a == logits for line in lines[leaves:enters]):
        out.append(Line(Kind.FREE, OUTSIDE, logits))
    return out + [line for line in lines[enters:] if not (line.kind is Kind.FREE and line.a in gone)]
