"""Where backwards of uses end, and where the gradients of units are complete, on the lines of a tape."""

from __future__ import annotations

from .description import OUTSIDE, Kind, Line


def with_ends(lines: list[Line]) -> list[Line]:
    """Each backward begins once, and ends after its last operation: a BACKWARD_END for each use."""
    begun: set[int] = set()
    last: dict[int, int] = {}
    once: list[Line] = []
    parents = _parents(lines)
    in_backward = False
    for line in lines:
        in_backward = in_backward or line.kind is Kind.LOSS
        if line.kind is Kind.REACHED and line.use not in begun:
            line = line._replace(kind=Kind.BACKWARD)
        if line.kind is Kind.BACKWARD:
            if line.use in begun:
                continue
            begun.add(line.use)
        once.append(line)
        use: int | None = line.use
        while in_backward and use is not None and use in begun:
            last[use] = len(once) - 1
            use = parents.get(use)
    ends: dict[int, list[int]] = {}
    for use, position in last.items():
        ends.setdefault(position, []).append(use)
    out: list[Line] = []
    for position, line in enumerate(once):
        out.append(line)
        out += [Line(Kind.BACKWARD_END, use) for use in sorted(ends.get(position, ()), reverse=True)]
    return out


def _parents(lines: list[Line]) -> dict[int, int]:
    """Returns for each use the one around it."""
    found: dict[int, int] = {}
    open_: list[int] = []
    for line in lines:
        if line.kind is Kind.ENTER:
            if open_:
                found[line.use] = open_[-1]
            open_.append(line.use)
        elif line.kind is Kind.EXIT:
            open_.remove(line.use)
    return found


def with_gradients(lines: list[Line], gradients: dict[int, int]) -> tuple[Line, ...]:
    """A line after the operation that made the last gradient of a unit."""
    last: dict[int, int] = {}
    for position, line in enumerate(lines):
        if line.kind is Kind.ALLOCATE and line.a in gradients:
            last[gradients[line.a]] = position
    ready = {position: unit for unit, position in last.items()}
    out: list[Line] = []
    due: int | None = None
    ran = False
    for position, line in enumerate(lines):
        # Autograd lets go of what an operation's node saved before it accumulates what it made.
        if due is not None and ran and line.kind is not Kind.FREE:
            out.append(Line(Kind.GRADS_READY, OUTSIDE, due))
            due = None
        out.append(line)
        if position in ready:
            due, ran = ready[position], False
        elif line.kind is Kind.OP:
            ran = True
    if due is not None:
        out.append(Line(Kind.GRADS_READY, OUTSIDE, due))
    return tuple(out)
