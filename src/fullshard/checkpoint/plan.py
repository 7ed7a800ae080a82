"""Parts of tensors: which part a rank holds, whether parts make up a tensor, and which of them a reader takes.

A part is a box: offsets and lengths in every dim. A tensor of shape (5, 3) on 4 ranks, dim 0, and the rows that rank 1
of 2 reads:

    saved    rank 0  (0, 0) + (2, 3)      rank 1  (2, 0) + (2, 3)     rank 2  (4, 0) + (1, 3)     rank 3  nothing
    wanted   (3, 0) + (2, 3)              -> row 3 from the second box, row 4 from the third

Pure arithmetic: no torch, no files.
"""

from __future__ import annotations

import contextlib
import fnmatch
import gc
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard

from ..layout import Box as Box
from ..layout import Cut as Cut
from ..layout import cutting_order as cutting_order
from ..layout import itemsize
from ..layout import local_box as local_box
from ..layout import overlap as overlap
from ..layout import whole as whole

# Under the key of a tensor around others (wrapped.py): what it is; where some of its rows are plain, those rows, and
# which rows the others are.
FLATTENED, REST, ROWS = "__tensor_flatten__", "__rest__", "__rows__"
# Sums of what ranks know are taken modulo this prime.
MODULUS = (1 << 61) - 1
# A position in a nested state dict: strings are keys of dicts, numbers positions in lists.
KeyPath = tuple[str | int, ...]


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Keep Python's collector of cycles off: of a hundred thousand tensors it takes longer than the plan. On the main
    thread alone, whose program cannot turn it off or on meanwhile."""
    pauses = threading.current_thread() is threading.main_thread() and gc.isenabled()
    if pauses:
        gc.disable()
    try:
        yield
    finally:
        if pauses:
            gc.enable()


def key_of(path: KeyPath) -> str:
    """The name of the entry at `path`.

    >>> key_of(("optimizer", "param_groups", 0, "lr"))
    'optimizer.param_groups.0.lr'
    """
    try:
        return ".".join(path)  # type: ignore[arg-type]
    except TypeError:  # with numbers; a model of experts has a hundred thousand paths, almost all without
        return ".".join(map(str, path))


def matches(key: str, patterns: Iterable[str]) -> bool:
    """Whether `key` matches one of `patterns`, in which * matches anything.

    >>> matches("optimizer.state.w.step", ["optimizer.*"]), matches("optimizers", ["optimizer.*"])
    (True, False)
    """
    for pattern in patterns:
        if fnmatch.fnmatchcase(key, pattern):
            return True
    return False


class TensorSpec(NamedTuple):
    """A tensor, whichever ranks hold its parts. `dtype`: torch's name without `torch.`."""

    path: KeyPath
    dtype: str
    shape: tuple[int, ...]

    @property
    def key(self) -> str:
        return key_of(self.path)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * itemsize(self.dtype)


def are_sizes(value: Any) -> TypeGuard[list[int]]:
    """Whether `value`, read from a file, is a list or tuple of offsets or lengths."""
    return isinstance(value, list | tuple) and all(
        isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 62 for n in value
    )


# ---- coverage --------------------------------------------------------------------------------------------------


def coverage_problem(shape: Sequence[int], boxes: Iterable[Box]) -> str | None:
    """Why `boxes` do not cover each element of a tensor of `shape` exactly once; None if they do.

    Empty boxes are ignored. One pass over the boxes in order of their first dim, comparing each with those that reach
    it: linear for slices of one dim.
    """
    covered, active = 0, list[Box]()
    for box in sorted(boxes):
        if len(box.offsets) != len(shape) or len(box.lengths) != len(shape):
            return f"a part {box} of a tensor of {len(shape)} dims"
        if any(o < 0 or n < 0 or o + n > size for o, n, size in zip(*box, shape, strict=True)):
            return f"a part {box} is outside of shape {tuple(shape)}"
        if not box.numel:
            continue
        if shape:
            active = [other for other in active if other.offsets[0] + other.lengths[0] > box.offsets[0]]
        for other in active:
            if overlap(box, other) is not None:
                return f"parts {other} and {box} overlap"
        active.append(box)
        covered += box.numel
    missing = math.prod(shape) - covered
    return f"{missing} of {math.prod(shape)} elements are in no part" if missing else None


# ---- groups of parameters --------------------------------------------------------------------------------------------
# Each stage of a pipeline has an optimizer of its own parameters. Its groups name them; those of all stages together
# are the groups of one optimizer of the whole model.


def is_grouping(path: Sequence[object]) -> bool:
    """Whether the value at `path` is an optimizer's groups, or the names of one group's parameters."""
    return path[-1] == "param_groups" or (len(path) > 2 and path[-1] == "params" and path[-3] == "param_groups")


def together(values: Sequence[Any]) -> Any:
    """The groups of parameters, or names, of several ranks together, each name once. Groups of equal settings become
    one. Raises `ValueError` if two ranks name the same parameter: they have one stage, and differ."""
    if len(values) == 1:
        return values[0]
    groups: list[dict[str, Any]] = []
    seen: set[str] = set()
    of_one_group = all(isinstance(item, str) for value in values for item in value)
    for value in values:
        mine = [{"params": value}] if of_one_group else list(value)
        names = [name for group in mine for name in group["params"]]
        if not all(isinstance(name, str) for name in names) or seen.intersection(names):
            raise ValueError("the same parameters")
        seen.update(names)
        if value is values[0]:
            groups = [{**group, "params": list(group["params"])} for group in mine]
            continue
        for index, group in enumerate(mine):
            # The group of the same number first: an optimizer may have several of equal settings.
            known = next(
                (one for one in [*groups[index : index + 1], *groups] if _settings(one) == _settings(group)), None
            )
            if known is None:
                groups.append({**group, "params": list(group["params"])})
            else:
                known["params"] += group["params"]
    return groups[0]["params"] if of_one_group else groups


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


# ---- reading ---------------------------------------------------------------------------------------------------


class Take(NamedTuple):
    """The elements that a reader takes from one stored part.

    `[first, stop)` are the elements of the part, in memory order, that have to be read. Of those, `lengths` with
    `strides` from `first` on are wanted (elements); they go to `target` in the box that is being filled."""

    part: int
    first: int
    stop: int
    lengths: tuple[int, ...]
    strides: tuple[int, ...]
    target: tuple[int, ...]

    @property
    def contiguous(self) -> bool:
        """Whether everything that is read is wanted."""
        return self.stop - self.first == math.prod(self.lengths)


def takes(wanted: Box, stored: Sequence[Box]) -> list[Take]:
    """The pieces of the `stored` parts that make up `wanted`, in their order. The manifest ensures that they cover it.

    >>> takes(Box((3, 0), (2, 3)), [Box((2, 0), (2, 3)), Box((4, 0), (1, 3))])[0]
    Take(part=0, first=3, stop=6, lengths=(1, 3), strides=(3, 1), target=(0, 0))
    """
    found = []
    for part, box in enumerate(stored):
        common = overlap(wanted, box)
        if common is None or not box.numel:
            continue
        strides = row_major(box.lengths)
        first = sum((o - p) * s for o, p, s in zip(common.offsets, box.offsets, strides, strict=True))
        last = first + sum((n - 1) * s for n, s in zip(common.lengths, strides, strict=True))
        target = tuple(o - w for o, w in zip(common.offsets, wanted.offsets, strict=True))
        found.append(Take(part, first, last + 1, common.lengths, strides, target))
    return found


def row_major(lengths: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, in elements."""
    strides = [1] * len(lengths)
    for dim in range(len(lengths) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * lengths[dim + 1]
    return tuple(strides)
