"""Boxes, names and routes: what each rank sends when tensors change their layout, against element by element."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from fullshard.layout import Box, Cut, Held, Parts, TransferPlan, itemsize, rename, spans, spread, whole


@pytest.mark.parametrize("lengths", [(), (5,), (3, 4), (2, 3, 2), (1, 4, 1)])
def test_spans_are_the_elements_of_a_range_in_their_order(lengths: tuple[int, ...]) -> None:
    everything = list(itertools.product(*map(range, lengths)))
    for start in range(len(everything) + 1):
        for stop in range(start, len(everything) + 1):
            boxes = spans(lengths, start, stop)
            found = [
                at for box in boxes for at in itertools.product(*(range(o, o + n) for o, n in zip(*box, strict=True)))
            ]
            assert found == everything[start:stop]
            assert len(boxes) <= 2 * len(lengths) + 1


class _World:
    """A transfer of tensors that are dicts from position to value, by the plan and nothing else."""

    def __init__(self, plan: TransferPlan, values: dict[str, dict[tuple[int, ...], int]]) -> None:
        self.plan, self.values = plan, values
        self.found: dict[int, dict[str, dict[tuple[int, ...], int]]] = {}
        self.written: Counter[tuple[int, str, tuple[int, ...]]] = Counter()

    def run(self) -> None:
        for rank in self.plan.ranks:
            sends = self.plan.sends(rank)
            assert all(self.plan.receives(peer)[rank] == route for peer, route in sends.items()), "ranks disagree"
            for route in sends.values():
                total, last = 0, 0
                for nbytes, cuttings in route.cut():
                    assert 0 < nbytes <= self.plan.limit_nbytes
                    for cutting in cuttings:
                        assert cutting.at % itemsize(cutting.piece.dtype) == 0, "not aligned"
                        boxes = spans(cutting.piece.box.lengths, cutting.start, cutting.stop)
                        for box in boxes:
                            self.move(rank, route.target, cutting.piece, box)
                    total, last = total + nbytes, nbytes
                assert total == route.nbytes and last
                assert sum(1 for _ in route.cut()) == route.messages <= route.nbytes / self.plan.limit_nbytes + 2
            for piece in self.plan.copies(rank):
                self.move(rank, rank, piece, whole(piece.box.lengths))

    def move(self, source: int, target: int, piece: object, box: Box) -> None:
        link, outer = piece.link, piece.box  # type: ignore[attr-defined]
        for at in itertools.product(*(range(o, o + n) for o, n in zip(*box, strict=True))):
            common = tuple(a + o for a, o in zip(at, outer.offsets, strict=True))
            there = tuple(a + o for a, o in zip(common, link.at_source, strict=True))
            here = tuple(a + o for a, o in zip(common, link.at_target, strict=True))
            there = there[1:] if link.lifted == "source" else there
            here = here[1:] if link.lifted == "target" else here
            held = self.plan.sources[link.source].parts.box(source)
            assert held is not None and _inside(there, held), "sends what it does not hold"
            own = self.plan.sources[link.source].parts.box(target)
            assert source == target or own is None or not _inside(there, own), "is sent what it has"
            wanted = self.plan.targets[link.target].parts.box(target)
            assert wanted is not None and _inside(here, wanted), "is sent what it does not hold"
            self.found.setdefault(target, {}).setdefault(link.target, {})[here] = self.values[link.source][there]
            self.written[target, link.target, here] += 1


def _inside(at: tuple[int, ...], box: Box) -> bool:
    return all(o <= a < o + n for a, o, n in zip(at, *box, strict=True))


def _elements(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, shape)))


def _random_parts(draw: random.Random, shape: tuple[int, ...], world: int) -> Parts:
    kind = draw.choice(["plain", "shard", "mesh"])
    ranks = draw.sample(range(world), draw.randint(1, world))
    if kind == "plain" or not shape:
        return Parts(spread(shape, (len(ranks),), ranks, [None]))
    if kind == "shard":
        return Parts(spread(shape, (len(ranks),), ranks, [Cut(draw.randrange(len(shape)))]))
    mesh = draw.choice([(2, 2), (2, 3), (1, 3), (3, 2)])
    ranks = draw.sample(range(world), mesh[0] * mesh[1])
    cuts: list[Cut | None] = [draw.choice([None, Cut(draw.randrange(len(shape)))]) for _ in mesh]
    if draw.random() < 0.3:
        cuts = [Cut(0, pieces=mesh[1]), Cut(0)]
    return Parts(spread(shape, mesh, ranks, cuts))


@pytest.mark.parametrize("seed", range(60))
def test_every_element_arrives_once_where_it_belongs(seed: int) -> None:
    """Any layouts over any two sets of ranks, dims smaller than the world, replicas, dtypes of several widths."""
    draw = random.Random(seed)
    world = 7
    sources, targets, values = {}, {}, {}
    for number in range(3):
        shape = tuple(draw.randint(1, 6) for _ in range(draw.randint(0, 3)))
        name = f"t{number}"
        dtypes = draw.sample(["float32", "bfloat16", "float64"], 2)
        sources[name] = Held(shape, dtypes[0], _random_parts(draw, shape, world))
        targets[name] = Held(shape, dtypes[1], _random_parts(draw, shape, world))
        values[name] = {at: draw.randrange(10**9) for at in _elements(shape)}
    links = rename(None, {name: held.shape for name, held in sources.items()}).links
    plan = TransferPlan(links, sources, targets, range(world), 16 * draw.randint(1, 4))
    played = _World(plan, values)
    played.run()
    for name, held in targets.items():
        for rank in range(world):
            box = held.parts.box(rank)
            expected = {at: value for at, value in values[name].items() if box is not None and _inside(at, box)}
            assert played.found.get(rank, {}).get(name, {}) == expected
    assert set(played.written.values()) <= {1}
    assert str(plan).startswith("3 tensors")


RULES: list[tuple[object, dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]] = [
    ({("l.*.q", "l.*.k"): "l.*.qk"}, {"l.0.q": (4, 3), "l.0.k": (2, 3), "l.1.q": (4, 3), "l.1.k": (2, 3)}, {}),
    ({"l.*.qk": ("l.*.q", "l.*.k")}, {"l.0.qk": (6, 3)}, {"l.0.q": (4, 3), "l.0.k": (2, 3)}),
    ({"l.*.qk": (("l.*.q", 5), ("l.*.k", 1))}, {"l.0.qk": (6, 3)}, {}),
    ({"e.#.up": "up"}, {f"e.{i}.up": (2, 3) for i in range(11)}, {}),
    ({"up": "e.#.up"}, {"up": (3, 2, 3)}, {}),
    ({("e.#.g", "e.#.u"): "gu"}, {f"e.{i}.{p}": (2, 3) for i in range(3) for p in "gu"}, {}),
    ({"gu": (("e.#.g", 2), ("e.#.u", 1))}, {"gu": (3, 3, 2)}, {}),
    ({"e.#.b": "b"}, {"e.0.b": (), "e.1.b": ()}, {}),
    ({"*": "model.*", "skipped": None}, {"a.b": (2,), "c": ()}, {}),
]


@pytest.mark.parametrize(("rules", "shapes", "targets"), RULES)
def test_names_move_every_element_of_any_layouts(
    rules: object, shapes: dict[str, tuple[int, ...]], targets: dict[str, tuple[int, ...]]
) -> None:
    """All elements of the sources arrive once, in any layouts, and each target is full."""
    found = rename(rules, shapes, targets)  # type: ignore[arg-type]
    assert not found.problems and not found.left_out
    draw = random.Random(str(rules))
    values = {name: {at: draw.randrange(10**9) for at in _elements(shape)} for name, shape in shapes.items()}
    for _ in range(4):
        held = {name: Held(shape, "float32", _random_parts(draw, shape, 7)) for name, shape in shapes.items()}
        wanted = {name: Held(shape, "float32", _random_parts(draw, shape, 7)) for name, shape in found.shapes.items()}
        played = _World(TransferPlan(found.links, held, wanted, range(7), 32), values)
        played.run()
        together: dict[str, dict[tuple[int, ...], int]] = {}
        for arrived in played.found.values():
            for name, elements in arrived.items():
                assert (
                    together.setdefault(name, {}).items() | elements.items()
                    == {
                        **together[name],
                        **elements,
                    }.items()
                ), "two ranks have two values"
                together[name].update(elements)
        assert {name: set(elements) for name, elements in together.items()} == {
            name: set(_elements(shape)) for name, shape in found.shapes.items()
        }
        everything = [value for elements in values.values() for value in elements.values()]
        assert sorted(v for elements in together.values() for v in elements.values()) == sorted(everything)


def test_names_by_example() -> None:
    """Positions, not only that all arrive."""
    found = rename({("e.#.g", "e.#.u"): "gu"}, {f"e.{i}.{p}": (2, 3) for i in range(2) for p in "gu"})
    at = {link.source: link.at_target for link in found.links}
    assert found.shapes == {"gu": (2, 4, 3)}
    assert at == {"e.0.g": (0, 0, 0), "e.0.u": (0, 2, 0), "e.1.g": (1, 0, 0), "e.1.u": (1, 2, 0)}
    found = rename(lambda name: None if name == "b" else f"m.{name}", {"a": (2,), "b": (3,)})
    assert list(found.shapes) == ["m.a"] and found.left_out == ["b"]
    found = rename({"q": "k"}, {"q": (2,), "k": (3,)})
    assert found.problems == ["k: made of two tensors, of which one is k"]


@pytest.mark.parametrize(
    ("rules", "shapes", "problem"),
    [
        ({("q", "k"): "qk"}, {"q": (2, 3)}, "k: needed beside q, and not there"),
        ({("q", "k"): "qk"}, {"q": (2, 3), "k": (2, 4)}, "k: (2, 4) does not fit beside (2, 3)"),
        ({"e.#": "e"}, {"e.0": (2,), "e.2": (2,)}, "e.#: expected the numbers 0, 1, ..., found [0, 2]"),
        ({"e.#": "e"}, {"e.0": (2,), "e.1": (3,)}, "e.1: (3,) does not fit beside (2,)"),
        ({"qk": ("q", "k")}, {"qk": (4, 3)}, "q: its part of qk is not known; write ('q', rows)"),
        ({"qk": (("q", 1), ("k", 2))}, {"qk": (4, 3)}, "qk: has 4 rows to split, its parts have 3"),
        ({"e": "e.#"}, {"e": ()}, "e: () has no rows to split"),
        (lambda name: 3, {"e": ()}, "e: expected a name or None of names(...), found 3"),
    ],
)
def test_rules_that_do_not_fit_are_problems(rules: object, shapes: dict[str, tuple[int, ...]], problem: str) -> None:
    assert rename(rules, shapes).problems == [problem]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "rules",
    [{"a.*": "b"}, {("a", "b"): ("c", "d")}, {"a.#.#": "b"}, {("a.#", "b"): "c"}, {"a": 3}, {3: "a"}, {"a": ()}],
)
def test_rules_that_mean_nothing_are_refused(rules: object) -> None:
    with pytest.raises(ValueError, match=r"^names: expected "):
        rename(rules, {})  # type: ignore[arg-type]


def test_ten_thousand_ranks_plan_only_what_is_theirs() -> None:
    """A plan of one rank compares its parts with their neighbours: one shape on ten thousand ranks is done once."""
    held = Parts(spread((40_000, 8), (10_000,), range(10_000), [Cut(0)]))
    wanted = Parts(spread((40_000, 8), (5_000,), range(5_000), [Cut(0)]))
    sources = {f"t{i}": Held((40_000, 8), "float32", held) for i in range(300)}
    targets = {f"t{i}": Held((40_000, 8), "float32", wanted) for i in range(300)}
    plan = TransferPlan(
        rename(None, {n: h.shape for n, h in sources.items()}).links, sources, targets, range(10_000), 4096
    )
    assert len(plan._known) == 0
    assert {peer: route.nbytes for peer, route in plan.receives(7).items()} == {14: 300 * 128, 15: 300 * 128}
    assert len(plan._known) == 1 and sum(map(len, plan._known.popitem()[1].of_source.values())) == 10_000
