"""The golden traces are true: torch's FSDP2, recorded again here, does what the committed files say.

`WRITE_GOLDEN=1` writes them instead of comparing; what then shows in a diff of traces/ is a change in torch
or in the recorder, to be understood before it is committed.
"""

import os

import pytest
import torch

from tests.harness import installed

if not torch.__version__.startswith("2.13."):
    pytest.skip(f"{installed.DIFFERS} the golden traces are those of torch 2.13", allow_module_level=True)

from tests.golden.record import patched, path_of, record  # noqa: E402
from tests.golden.scenarios import Scenario, cases  # noqa: E402

WRITE = os.environ.get("WRITE_GOLDEN") == "1"


@pytest.mark.slow
@pytest.mark.drawn(6)
@pytest.mark.parametrize(
    ("scenario", "reshard"), cases(), ids=lambda value: value if isinstance(value, str) else value.name
)
def test_trace_is_what_torch_does(scenario: Scenario, reshard: str) -> None:
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
