"""Pipelines as numbers: schedules and their rules, who has which stages, balanced parts, and what is not legal."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from fullshard.migrate import ConfigError, read_config
from fullshard.migrate.parallelism import ModelShape, Parallelism
from fullshard.migrate.schedules import SCHEDULES, Cost, balanced, find_schedule, stages_of

PP = "parallelism.pipeline_parallel_"


@given(some.integers(1, 5), some.integers(1, 3), some.sampled_from(list(SCHEDULES.values())))
def test_every_stage_is_on_one_rank(degree: int, each: int, schedule: Any) -> None:
    each = schedule.stages or each
    held = [stages_of(place, degree, each, schedule) for place in range(degree)]
    assert sorted(stage for stages in held for stage in stages) == list(range(degree * each))
    assert all(len(stages) == each for stages in held)
    if schedule.v:
        assert held[0] == (0, 2 * degree - 1)


@given(some.lists(some.tuples(some.integers(0, 9), some.integers(0, 9)), min_size=1, max_size=7), some.integers(1, 4))
def test_parts_are_balanced(pairs: list[tuple[int, int]], parts: int) -> None:
    """Compared with all divisions: the least most work, and among those the least largest size."""
    costs = [Cost(work, work + size) for work, size in pairs]
    if len(costs) < parts:
        with pytest.raises(ValueError, match=f"expected at least {parts} modules"):
            balanced(costs, parts)
        return

    def largest(begins: tuple[int, ...]) -> tuple[int, int]:
        runs = [costs[a:b] for a, b in zip(begins, (*begins[1:], len(costs)), strict=True)]
        return max(sum(c.work for c in run) for run in runs), max(sum(c.size for c in run) for run in runs)

    every = [(0, *rest) for rest in itertools.combinations(range(1, len(costs)), parts - 1)]
    assert largest(tuple(balanced(costs, parts))) == min(map(largest, every))


@pytest.mark.parametrize("name", ["1f1b", "Interleaved1F1B", "ScheduleGPipe", "schedulezbvzerobubble"])
def test_names_of_schedules(name: str) -> None:
    found = find_schedule(name)
    assert SCHEDULES[found.name] is found
    plan = Parallelism(pipeline_parallel_degree=2, pipeline_parallel_schedule=name)
    assert plan.pipeline_parallel_schedule == found.name and plan.num_stages == 2 * (found.stages or 2)
    table = {"parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": name}}
    assert read_config(table).parallel == plan


def test_torch_has_these_schedules_with_these_rules() -> None:
    """Each name has its class there, and each class its name here."""
    from torch.distributed.pipelining.schedules import get_schedule_class

    for name in SCHEDULES:
        cls = get_schedule_class(name)
        assert find_schedule(cls).name == name


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"schedule": "Interleaved"}, 'expected one of 1F1B, .*; nearest valid: "Interleaved1F1B"'),
        ({"schedule": 3}, 'expected the name of a schedule; nearest valid: "1F1B"'),
        ({"schedule": "GPipe", "stages_per_rank": 2}, "GPipe has 1 on each rank; nearest valid: 1"),
        ({"schedule": "DualPipeV", "stages_per_rank": 1}, "DualPipeV has 2 on each rank; nearest valid: 2"),
        ({"num_microbatches": 1}, "1F1B needs at least as many as there are stages, 2; nearest valid: 2"),
        ({"schedule": "DualPipeV", "num_microbatches": 3}, "as many as there are stages, 4; nearest valid: 4"),
        ({"schedule": "Interleaved1F1B", "num_microbatches": 5}, "in 2 rounds, .* equal; nearest valid: 4"),
        ({"num_microbatches": 2, "microbatch_size": 2}, "found both; leave one out; nearest valid: 0"),
        ({"num_microbatches": -1}, "expected at least 0; nearest valid: 0"),
    ],
)
def test_what_is_not_legal_is_one_line_with_the_nearest(keys: dict[str, Any], said: str) -> None:
    for make in (lambda t: Parallelism(**t), lambda t: read_config({"parallelism": t})):
        with pytest.raises(ConfigError, match=f"^{PP}.*{said}$") as raised:
            make({"pipeline_parallel_degree": 2} | {f"pipeline_parallel_{key}": value for key, value in keys.items()})
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([["a"], ["b"], ["c"]], "expected a list for each of the 2 stages .* found 3; nearest valid: 2 lists"),
        ("a", "expected a list with the names of modules for each stage"),
        (["a", "b"], "expected a list with names of modules"),
        ([["a"], []], "expected a list with names of modules"),
        ([["a"], ["a"]], "expected each module once, found a twice"),
    ],
)
def test_parts_that_are_not_legal(parts: Any, said: str) -> None:
    for table in ({"pipeline_parallel_degree": 2, "module_fqns_per_model_part": parts},):
        with pytest.raises(ConfigError, match=f"^parallelism.module_fqns_per_model_part.*{said}"):
            Parallelism(**table)
        with pytest.raises(ConfigError, match=f"^parallelism.module_fqns_per_model_part.*{said}"):
            read_config({"parallelism": table})


@pytest.mark.parametrize("key", ["schedule", "microbatch_size", "num_microbatches", "stages_per_rank"])
def test_a_key_without_a_pipeline(key: str) -> None:
    value = "GPipe" if key == "schedule" else 2
    with pytest.raises(ConfigError, match=rf"^{PP}{key} = .* no effect with pipeline_parallel_degree = 1"):
        Parallelism(**{f"pipeline_parallel_{key}": value})  # type: ignore[arg-type]


def test_fewer_layers_than_stages() -> None:
    """The proposed plan has a layer for each stage."""
    plan = Parallelism(pipeline_parallel_degree=4, pipeline_parallel_schedule="LoopedBFS")
    with pytest.raises(ConfigError, match="degree = 4 of 2 stages on each rank: .* found 6 layers; .*degree = 2"):
        plan.on(8, ModelShape(layers=6))
    assert plan.on(8, ModelShape(layers=8)).pp == 4
