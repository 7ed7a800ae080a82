"""What the interface of a host counts in a step is what `fullshard plan --hosts` predicts, in one and in two levels."""

from __future__ import annotations

import statistics

import pytest

from benchmarks import hosts
from benchmarks.common import ModelShape

pytestmark = [pytest.mark.hang_after(600), pytest.mark.slow]
# 2.4 M parameters: comparisons and acknowledgements of a step, about 60 kB, are a small part of its messages.
SHAPE = ModelShape(vocabulary=256, depth=3)
TOLERANCE = 0.03


@pytest.mark.parametrize("local, precision", [(1, "fp32"), (2, "fp32"), (2, "mixed")])
def test_a_host_sends_what_the_plan_says(local: int, precision: str) -> None:
    names = tuple(name for name in hosts.names_of(local) if name.startswith("fullshard"))
    case = hosts.Case(local, "unlimited", precision, names, 1, SHAPE)
    answers = hosts.measure(case)
    found = {}
    for name in names:
        counted = max(statistics.median(answers[host * local]["payload"][name]) for host in range(hosts.HOSTS))
        found[name] = counted / hosts.predicted(case, name)
    assert found == pytest.approx(dict.fromkeys(names, 1.0), rel=TOLERANCE), found
    if local > 1:
        assert hosts.predicted(case, "fullshard_one_level") > 1.5 * hosts.predicted(case, "fullshard")
