"""`prepare_fully_shard` with `pipeline_parallel_degree`: every schedule equals one process, from one declaration."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from fullshard.migrate.schedules import SCHEDULES
from tests.harness.axes import llama
from tests.harness.errors import RanksFailed
from tests.harness.installed import fails_before
from tests.harness.pipelines import TIMEOUT, check, planned
from tests.harness.pool import pool

TWO = {"pipeline_parallel_degree": 2}
SENDS_TO_ITSELF = fails_before(
    (2, 12), "before the first step a rank sends from one stage of its own to the next, which gloo cannot", half="both"
)
four = partial(llama, layers=4)


@pytest.mark.sample(3)
@pytest.mark.parametrize("reshard", ["default", True, False, 2])
@pytest.mark.parametrize(
    "schedule", [pytest.param(name, marks=SENDS_TO_ITSELF if found.v else ()) for name, found in SCHEDULES.items()]
)
def test_every_schedule_trains_as_one_process_or_is_refused(schedule: str, reshard: Any) -> None:
    """Four stages on two ranks where a schedule has several, two shards of each. The default keeps weights."""
    plan = {**TWO, "pipeline_parallel_schedule": schedule, "pipeline_parallel_num_microbatches": 4}
    config = {"reshard_after_forward": reshard}
    if SCHEDULES[schedule].splits and reshard in (True, 2):
        with pytest.raises(RanksFailed, match=rf"reshard_after_forward = {str(reshard).lower()} of \S+: {schedule} c"):
            pool(4).run(planned, four, plan, config, range(1), timeout=TIMEOUT)
        return
    printed = "\n".join(check(4, four, plan, config))
    assert f"pipeline: {schedule}; this rank has" in printed


# ---- beside other axes -----------------------------------------------------------------------------------------------

V = {**TWO, "pipeline_parallel_schedule": "ZBVZeroBubble"}
LOOPS = {**TWO, "pipeline_parallel_schedule": "Interleaved1F1B"}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("world", "plan"),
    [
        (4, {**TWO, "tensor_parallel_degree": 2}),
        (4, {**LOOPS, "tensor_parallel_degree": 2, "enable_sequence_parallel": False}),
        (4, {**TWO, "tensor_parallel_degree": 2, "enable_loss_parallel": True}),
        (4, {**TWO, "data_parallel_replicate_degree": 2}),
        (4, {"pipeline_parallel_degree": 4}),
        (2, LOOPS),
        (8, {**TWO, "tensor_parallel_degree": 2}),
        (8, {**TWO, "data_parallel_replicate_degree": 2}),
        (8, {**LOOPS, "tensor_parallel_degree": 2, "enable_loss_parallel": True}),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "-".join(map(str, value.values())),
)
def test_a_pipeline_and_other_axes(world: int, plan: dict[str, Any]) -> None:
    """PP x TP, with sequence and loss parallelism, PP x HSDP, PP alone, and PP x TP x FSDP, with recomputation."""
    check(world, four, plan, {"activation_checkpointing": "units"})
