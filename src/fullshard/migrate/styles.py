"""How tensor parallelism divides modules, in words: a style for each pattern of names. No torch.

A style is a kind, and where it matters the layout of what the module gets before it, and of what it returns after it:

    column               a linear layer cut along its outputs, or an embedding along its width
    row                  a linear layer cut along its inputs, or an embedding along its vocabulary
    sequence             a norm that is replicated, and works on its part of the sequence
    heads                a norm that is replicated, and works on this rank's heads
    input                no parameters of its own: what it gets is made whole for the layers in it
    replicated           whole on each rank, as a DTensor
    expert               experts, which ranks along `ep` divide; they need no tensor parallelism
    keep                 left as it is, whole on each rank
    column->whole        its output is put together
    sequence->row->whole

The layouts are `whole` (equal on all ranks), `sequence` (each rank has a part of the tokens, along dim 1) and `cut`
(each rank has a part of the features).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ..keys import ConfigError

WHOLE, SEQUENCE, CUT = "whole", "sequence", "cut"
LAYOUTS = (WHOLE, SEQUENCE, CUT)
# By kind: the layouts before and after, unless the style says others.
KINDS = {
    "column": (WHOLE, CUT),
    "row": (CUT, WHOLE),
    "sequence": (SEQUENCE, SEQUENCE),
    "heads": (CUT, CUT),
    "input": (WHOLE, WHOLE),
    "replicated": (WHOLE, WHOLE),
    "expert": (WHOLE, WHOLE),
    "keep": (WHOLE, WHOLE),
}

# What Hugging Face's models call them in `base_model_tp_plan`.
_HUGGING_FACE = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "column->whole",
    "rowwise_split_input": "whole->row",
    "embedding_rowwise": "row",
    "embedding_colwise": "column->whole",
    "replicated_with_grad_allreduce": "heads",
    "replicate": "replicated",
}


@dataclass(frozen=True, slots=True)
class Style:
    """
    >>> Style.read("sequence->row")
    Style(kind='row', before='sequence', after='whole')
    >>> str(Style.read("column->cut"))
    'column'
    """

    kind: str
    before: str
    after: str

    @classmethod
    def read(cls, text: str, where: str = "parallelism.styles") -> Style:
        """The style of a text. Raises `ConfigError` with all that it may be."""
        parts = [part.strip() for part in text.split("->")]
        # "sequence" is a kind and a layout: the kind is the part in the middle, or the one beside a layout.
        at = 1 if len(parts) == 3 or (len(parts) == 2 and parts[0] in LAYOUTS and parts[1] in KINDS) else 0
        kind = parts[at]
        others = parts[:at] + parts[at + 1 :]
        if len(parts) > 3 or kind not in KINDS or not set(others) <= set(LAYOUTS):
            raise ConfigError(
                f'{where} = "{text}": expected one of {", ".join(KINDS)}, with layouts as in "sequence->row" or '
                f'"column->whole" ({", ".join(LAYOUTS)}); nearest valid: "keep"'
            )
        before, after = KINDS[kind]
        return cls(kind, parts[0] if at else before, parts[-1] if at + 1 < len(parts) else after)

    def __str__(self) -> str:
        before, after = KINDS[self.kind]
        text = self.kind if self.before == before else f"{self.before}->{self.kind}"
        return text if self.after == after else f"{text}->{self.after}"

    @property
    def divides(self) -> bool:
        """Whether each rank has a part of the module's parameters."""
        return self.kind in ("column", "row")


def of_hugging_face(plan: Mapping[str, str]) -> dict[str, str]:
    """The styles of a model's own plan. A layer of a style that is not known here, such as fused experts, stays whole,
    and so does all that shares its parent: what one of them returns is what another one gets.

    >>> of_hugging_face({"mlp.gate_up": "packed_colwise", "mlp.down": "rowwise", "q_proj": "colwise"})
    {'mlp.gate_up': 'keep', 'mlp.down': 'keep', 'q_proj': 'column'}
    """
    unknown = {name.rpartition(".")[0] for name, word in plan.items() if word not in _HUGGING_FACE}

    def kept(name: str) -> bool:
        return any(name.startswith(f"{parent}.") if parent else True for parent in unknown)

    return {name: "keep" if kept(name) else _HUGGING_FACE[word] for name, word in plan.items()}


def expanded(styles: Mapping[str, str], names: Iterable[str]) -> tuple[dict[str, Style], list[str]]:
    """The style of each of `names` that a pattern matches, the last one of several, in the order of `names`; and the
    patterns that match none. `*` stands for any text within one part of a name."""
    found: dict[str, Style] = {}
    unmatched = []
    names = list(names)
    for pattern, text in styles.items():
        style = Style.read(text, f'parallelism.styles["{pattern}"]')
        parts = pattern.split(".")
        matched = [name for name in names if _matches(name.split("."), parts)]
        found.update(dict.fromkeys(matched, style))
        if not matched:
            unmatched.append(pattern)
    return {name: found[name] for name in names if name in found}, unmatched


def _matches(parts: list[str], pattern: list[str]) -> bool:
    return len(parts) == len(pattern) and all(map(fnmatchcase, parts, pattern))


# ---- messages --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages of a rank along one axis in one step, of one kind. nbytes: of the whole tensor, of all of them."""

    axis: str
    operation: str
    count: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.axis}: {self.count} x {self.operation}, {self.nbytes:,} bytes"


def messages_of(
    styles: Mapping[str, Style],
    widths: Mapping[str, tuple[int, int]],
    tokens: int,
    itemsize: int,
    lookups: Iterable[str] = (),
) -> list[Messages]:
    """The messages of one forward and one backward over `tp`, for a whole model.

    styles: of all modules, by name. widths: of each of them (features before, after). tokens: of one batch of a rank,
    the whole sequences. lookups: the names of embeddings, whose inputs need no gradient.
    """
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    prepared = [name for name, style in styles.items() if style.kind == "input"]
    lookups = set(lookups)

    def add(operation: str, features: int) -> None:
        counts[operation] += 1
        sizes[operation] += tokens * features * itemsize

    for name, style in styles.items():
        before, after = widths[name]
        inside = any(name != outer and name.startswith(f"{outer}.") for outer in prepared)
        if style.kind in ("column", "input") and name not in lookups and not (inside and style.kind == "column"):
            if style.before == SEQUENCE:
                add("all_gather", before)
                add("reduce_scatter", before)
            elif style.kind == "input" and style.after == SEQUENCE:
                add("all_gather", before)
            else:
                add("all_reduce", before)
        if style.kind == "column" and style.after == WHOLE:
            add("all_gather", after)
        if style.kind == "row":
            if style.before == WHOLE and name not in lookups:
                add("all_gather", before)  # the gradient of an input that each rank took its part of
            if style.after == SEQUENCE:
                add("reduce_scatter", after)
                add("all_gather", after)
            else:
                add("all_reduce", after)
        if style.kind == "sequence" and style.after == WHOLE:
            add("all_gather", after)
    return [Messages("tp", operation, counts[operation], sizes[operation]) for operation in sorted(counts)]
