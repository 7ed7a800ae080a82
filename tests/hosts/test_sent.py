"""What the interface of a host counts in a step is what `fullshard plan --hosts` predicts and `fullshard.report` says,
in one level and in two; and which of both is chosen, by links and memories of known rates."""

from __future__ import annotations

import statistics

import pytest

from benchmarks import hosts
from benchmarks.common import TINY, ModelShape

pytestmark = pytest.mark.hang_after(600)
# 2.4 M parameters: comparisons and acknowledgements of a step, about 60 kB, are a small part of its messages.
SHAPE = ModelShape(vocabulary=256, depth=3)
TOLERANCE = 0.03


@pytest.mark.slow
@pytest.mark.parametrize("local, precision", [(1, "fp32"), (2, "fp32"), (2, "mixed")])
def test_a_host_sends_what_the_plan_says(local: int, precision: str) -> None:
    names = tuple(name for name in hosts.names_of(local) if name.startswith("fullshard"))
    case = hosts.Case(local, "unlimited", precision, names, 1, SHAPE)
    answers = hosts.measure(case)
    found, planned = {}, {}
    for name in names:
        counted = max(statistics.median(answers[host * local]["payload"][name]) for host in range(hosts.HOSTS))
        reports = [answer["hosts"][name] for answer in answers]
        assert reports == reports[:1] * case.world and reports[0]["number"] == hosts.HOSTS
        planned[name] = hosts.predicted(case, name, reports[0]["ways"])
        assert reports[0]["sent_nbytes"] == pytest.approx(planned[name], rel=1e-6)
        found[name] = counted / planned[name]
    assert found == pytest.approx(dict.fromkeys(names, 1.0), rel=TOLERANCE), found
    if local > 1:
        assert planned["fullshard_one_level"] > 1.5 * planned["fullshard_two_levels"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rate", "within", "ways"),
    [
        pytest.param("100mbit", "", "two levels", marks=pytest.mark.slow),
        # Processes of a host reach each other more slowly than another host.
        ("1gbit", "20mbit", "one level"),
    ],
)
def test_the_faster_way_is_chosen(rate: str, within: str, ways: str) -> None:
    case = hosts.Case(2, rate, "fp32", ("fullshard",), 1, TINY, within)
    reports = [answer["hosts"]["fullshard"] for answer in hosts.measure(case)]
    assert reports == reports[:1] * 4
    assert reports[0]["ways"] == ways, reports
    # A bucket lets a few packets pass at once, and a busy machine is slower than its link.
    limit = {"20mbit": 2.5e6, "100mbit": 12.5e6, "1gbit": 125e6}
    assert reports[0]["rates"]["between"] < 1.3 * limit[rate]
    assert not within or reports[0]["rates"]["within"] < 1.3 * limit[within]
