"""Questions about a strategy, each answered by plans of what it changes: `fullshard plan --explain QUESTION`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from .description import OUTSIDE
from .recomputation import NONE, RECOMPUTATIONS, SELECTIVE, WHOLE
from .result import Plan, duration, gigabytes
from .search import Change, Planner, sharing
from .strategy import OPTIMIZERS, Strategy

Answer = list[str]


def explain(question: str, planner: Planner, asked: Strategy) -> Answer:
    """The answer to one of `QUESTIONS`, as lines. Raises `ValueError` for another one."""
    if question not in QUESTIONS:
        raise ValueError(f"--explain {question}: expected one of {', '.join(QUESTIONS)}")
    return [QUESTIONS[question][0], *QUESTIONS[question][1](planner, asked)]


def _row(label: str, plan: Plan, width: int = 34) -> str:
    fits = "fits" if plan.fits else "does not fit"
    return (
        f"  {label:<{width}} peak {gigabytes(plan.peak_nbytes):>10}, {fits:<12}  step {duration(plan.seconds):>9}, "
        f"{plan.tokens_per_second:>9,.0f} tokens/s per rank"
    )


def _rows(planner: Planner, variants: Iterable[tuple[str, Strategy]]) -> Answer:
    found = [(label, planner.plan(strategy)) for label, strategy in variants]
    width = max((len(label) for label, _ in found), default=0)
    return [_row(label, plan, width) for label, plan in found]


def _peak(planner: Planner, asked: Strategy) -> Answer:
    plan = planner.plan(asked)
    terms = [f"  {gigabytes(nbytes):>10}  {name}" for name, nbytes in plan.largest]
    return [_row(str(asked), plan), f"  in {plan.simulated.peak.phase}; the five largest things:", *terms]


def _wrapping(planner: Planner, asked: Strategy) -> Answer:
    # Recomputation of the model as a whole frees nothing.
    return [
        _row("as sharded", planner.plan(asked)),
        _row("the whole model as one unit", planner.plan(replace(asked, recompute=NONE), alone=True)),
        *(
            [_row("as sharded, no recomputation", planner.plan(replace(asked, recompute=NONE)))]
            if asked.recompute != NONE
            else []
        ),
    ]


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits, 0 for none: what is larger needs more."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _batch(planner: Planner, asked: Strategy) -> Answer:
    found = []
    for way in (NONE, SELECTIVE, WHOLE):
        one = replace(asked, recompute=way, accumulate=1)
        best = _largest(lambda n, one=one: planner.estimate(replace(one, micro=n)).fits, 4096)  # type: ignore[misc]
        label = "recompute " + way
        if best:
            found.append(_row(f"{label}: micro-batch {best}", planner.estimate(replace(one, micro=best))))
        else:
            found.append(f"  {label}: not even one sample fits")
    return found


def _sequence(planner: Planner, asked: Strategy) -> Answer:
    first = planner.model(asked.micro, asked.computed)
    if first.tokens <= first.samples:
        return ["  the batch has no sequences"]
    # Memory grows with the square of the length at most: a few lengths, then between the last two.
    length = first.tokens // first.samples
    step = max(length // 4, 1)

    def fits(quarters: int) -> bool:
        return planner.plan(asked, sequence=quarters * step).fits

    best = _largest(fits, 64)
    if not best:
        return [f"  not even {step} tokens fit"]
    plan = planner.plan(asked, sequence=best * step)
    return [_row(f"{best * step:,} tokens, in steps of {step}", plan)]


def _ranks(planner: Planner, asked: Strategy) -> Answer:
    variants = []
    for times in (1, 2, 4, 8):
        if (asked.ranks * times) % asked.replicas == 0 and isinstance(asked.reshard, bool):
            more = replace(asked, ranks=asked.ranks * times)
            variants.append((f"{more.ranks} ranks", more))
    return _rows(planner, variants)


def _offload(planner: Planner, asked: Strategy) -> Answer:
    here, there = (asked.with_activations(hosted=hosted) for hosted in (False, True))
    variants = (
        ("on the device", replace(here, offload=False)),
        ("shards and state on the host", replace(here, offload=True)),
        ("activations on the host", replace(there, offload=False)),
        ("both on the host", replace(there, offload=True)),
    )
    found = []
    for label, strategy in variants:
        plan = planner.plan(strategy)
        share = f" of {gigabytes(plan.host_budget)}" if plan.host_budget else ""
        found.append(
            _row(label, plan) + (f", {gigabytes(plan.host_peak_nbytes)}{share} on the host" if plan.host_terms else "")
        )
    return found


def _optimizer(planner: Planner, asked: Strategy) -> Answer:
    return _rows(planner, [(name, replace(asked, optimizer=name)) for name in OPTIMIZERS])


def _recompute(planner: Planner, asked: Strategy) -> Answer:
    return _rows(planner, [(f"recompute {way}", replace(asked, recompute=way)) for way in RECOMPUTATIONS])


def _by_unit(planner: Planner, asked: Strategy) -> Answer:
    """The fewest units that are recomputed such that it fits; those that come first live longest."""
    units = len(planner.model(asked.micro, asked.computed).units)

    def with_first(count: int) -> Strategy:
        ways = tuple(WHOLE if 0 < i <= count else NONE for i in range(units))
        return replace(asked, recompute=ways)

    counts = sorted({0, units // 4, units // 2, 3 * units // 4, units - 1})
    found = _rows(planner, [(f"the first {count} of {units - 1} units", with_first(count)) for count in counts])
    low, high = 0, units - 1
    if not planner.plan(with_first(high)).fits:
        return [*found, "  it does not fit with all of them recomputed either"]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if planner.plan(with_first(middle)).fits else (middle + 1, high)
    return [*found, f"  fewest that fit: {low}", _row(f"the first {low}", planner.plan(with_first(low)))]


def _reduce_dtype(planner: Planner, asked: Strategy) -> Answer:
    names = {"float32": "float32", asked.compute: "that of the gradients"}
    found = []
    for dtype, label in names.items():
        plan = planner.plan(replace(asked, reduce=dtype))
        sent = sum(t.nbytes for t in plan.simulated.traffic.values())
        found.append(f"{_row(f'reduced in {label}', plan)}, {gigabytes(sent)} of messages")
    return found


def _precision(planner: Planner, asked: Strategy) -> Answer:
    return _rows(
        planner,
        [
            ("parameters as stored", replace(asked, compute="", reduce="")),
            ("bfloat16, reduced in float32", replace(asked, compute="bfloat16", reduce="float32")),
            ("bfloat16, reduced in bfloat16", replace(asked, compute="bfloat16", reduce="bfloat16")),
        ],
    )


def _hsdp(planner: Planner, asked: Strategy) -> Answer:
    ranks, node = asked.ranks // asked.tensor, max(planner.hardware.node // asked.tensor, 1)
    degrees = [ranks // n for n in reversed(sharing(ranks, node)) if n % asked.context == 0]
    reshard = asked.reshard if isinstance(asked.reshard, bool) else True
    variants = [(n, replace(asked, replicas=n, reshard=reshard)) for n in degrees]
    return _rows(planner, [(f"{n} replicas of {ranks // n} ranks", strategy) for n, strategy in variants])


def _smaller_mesh(planner: Planner, asked: Strategy) -> Answer:
    degrees = [n for n in (2, 4, 8, 16, 32) if n < asked.shard and asked.shard % n == 0]
    variants: list[tuple[str, Strategy]] = [("reshard to all ranks", replace(asked, reshard=True))]
    variants += [(f"reshard to {n} ranks", replace(asked, reshard=n)) for n in degrees]
    return _rows(planner, variants)


def _no_reshard(planner: Planner, asked: Strategy) -> Answer:
    return _rows(
        planner, [("reshard after forward", replace(asked, reshard=True)), ("keep them", replace(asked, reshard=False))]
    )


def _activations(planner: Planner, asked: Strategy) -> Answer:
    plan = planner.plan(asked)
    rows = sorted(((nbytes, number) for number, nbytes in plan.step.held), reverse=True)[:12]
    return [
        f"  {gigabytes(nbytes):>10}  {'outside of units: the loss' if i == OUTSIDE else plan.units[i].shape.title}"
        for nbytes, i in rows
    ]


def _unsharded(planner: Planner, asked: Strategy) -> Answer:
    plan = planner.plan(asked)
    found = [t for t in plan.simulated.terms if t[0].startswith(("full parameters", "gradients ", "kept parts"))]
    return [
        f"  {gigabytes(nbytes):>10}  {name}" for name, nbytes in found if not name.startswith("gradients of shards")
    ]


def _frees_nothing(planner: Planner, asked: Strategy) -> Answer:
    before, after = (planner.plan(replace(asked, recompute=way)) for way in (NONE, WHOLE))
    saved = before.step.held_nbytes - after.step.held_nbytes
    found = [
        f"  recomputation frees {gigabytes(saved)} of the {gigabytes(before.step.held_nbytes)} that forwards hold, and "
        f"{gigabytes(before.peak_nbytes - after.peak_nbytes)} of the peak",
        f"  the peak is then in {after.simulated.peak.phase}, made of",
    ]
    return [*found, *(f"  {gigabytes(nbytes):>10}  {name}" for name, nbytes in after.largest)]


def _cheapest(planner: Planner, asked: Strategy) -> Answer:
    changes = planner.search(asked, most=5)
    left = planner.left_out.lines()
    found = ranked(changes) if changes else ["  nothing that was tried fits: use more ranks, or shorter sequences"]
    return [*found, *(["left out of the search", *left] if left else [])]


def ranked(changes: Sequence[Change]) -> Answer:
    """The changes, one in a line."""
    width = max((len(change.says) for change in changes), default=0)
    return [_row(change.says, change.plan, width) for change in changes]


# Name -> (the question, what answers it); in the order of pytorch#125323.
QUESTIONS: dict[str, tuple[str, Callable[[Planner, Strategy], Answer]]] = {
    "peak": ("What is the peak, and what is it made of?", _peak),
    "wrapping": ("What does wrapping by unit change?", _wrapping),
    "batch": ("Which micro-batch is the largest that fits?", _batch),
    "sequence": ("Which sequence is the longest that fits?", _sequence),
    "ranks": ("What do more ranks change?", _ranks),
    "offload": ("What does offload to the host save?", _offload),
    "optimizer": ("What does another optimizer save?", _optimizer),
    "recompute": ("Which recomputation?", _recompute),
    "recompute-by-unit": ("How many units have to be recomputed?", _by_unit),
    "reduce-dtype": ("What does reduction in float32 cost?", _reduce_dtype),
    "precision": ("What does mixed precision change?", _precision),
    "hsdp": ("When do replicas make sense?", _hsdp),
    "smaller-mesh": ("Can parameters be kept by fewer ranks between forward and backward?", _smaller_mesh),
    "no-reshard": ("Can full parameters stay after forward?", _no_reshard),
    "activations": ("Which units hold activations at the end of the forward?", _activations),
    "unsharded": ("Which units hold full parameters and gradients at the peak?", _unsharded),
    "recompute-frees": ("Why does recomputation free so little?", _frees_nothing),
    "cheapest": ("What is the cheapest change that fits?", _cheapest),
}
