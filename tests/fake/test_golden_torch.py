"""The golden traces are true: torch's FSDP2, recorded again here, does what the committed files say.

They were recorded with torch 2.13. FSDP2 of 2.10 to 2.15 does the same in all of them, so that there is one file for
all versions; the first version that does something else makes this red. One scenario fails with that of 2.10.

`WRITE_GOLDEN=1` writes them instead of comparing; what then shows in a diff of traces/ is a change in torch
or in the recorder, to be understood before it is committed.
"""

import os

import pytest

from tests.golden.record import patched, path_of, record
from tests.golden.scenarios import Scenario, cases
from tests.harness.implementations import TORCH, Implementation
from tests.harness.installed import fails_before

WRITE = os.environ.get("WRITE_GOLDEN") == "1"
OLD_TORCH = fails_before((2, 11), "FSDP2 finds shards where a checkpoint recomputes a unit inside of a unit")


@pytest.mark.sample(full=22)
@pytest.mark.parametrize("impl", [TORCH], ids=repr)
@pytest.mark.parametrize(
    ("scenario", "reshard"),
    [pytest.param(*case, marks=OLD_TORCH if case[0].name == "checkpoint_nested_units" else ()) for case in cases()],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_trace_is_what_torch_does(scenario: Scenario, reshard: str, impl: Implementation) -> None:
    """The same events and the same commands, in the same order, under each event."""
    found, path = record(scenario, reshard), path_of(scenario, reshard)
    if WRITE:
        path.parent.mkdir(exist_ok=True)
        path.write_text(found)
    assert path.read_text() == found


def test_recording_leaves_torch_as_it_was() -> None:
    """Nothing of the recorder stays behind, also after an error."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as group_module
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    from tests.golden.record import Recorder

    owners = (FSDPModule, FSDPParamGroup, FSDPState, group_module)
    before = [dict(vars(owner)) for owner in owners]
    with pytest.raises(KeyboardInterrupt), patched(Recorder()):
        assert [dict(vars(owner)) for owner in owners] != before
        raise KeyboardInterrupt
    assert [dict(vars(owner)) for owner in owners] == before
