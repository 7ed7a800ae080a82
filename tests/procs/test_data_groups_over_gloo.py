"""What the package promises holds over real gloo processes with one, two and four ranks: tests of the threads tier, run
with `--ranks=gloo --world=N` in a child. A case for each promise here; all of the tier in the full run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fullshard import fully_shard
from tests.harness.models import assert_close_to_tensor_max, seeded
from tests.harness.pool import pool

ROOT = Path(__file__).parents[2]
WORLDS = (1, 2, 4)

# What is promised, and cases that show it; {world} is the number of ranks.
LINES: dict[str, tuple[str, ...]] = {
    "a module or a list": (
        "conformance_training::test_training_with_adamw_equals_the_plain_model[{world}-transformer-fullshard]",
        "surface_lists::test_a_list_trains_as_plain_modules_do[a loss in chunks, one backward-fullshard]",
    ),
    "register_fsdp_forward_method": ("surface_calls::test_a_registered_method_trains[_encode-fullshard]",),
    "share_comm_ctx": ("surface_calls::test_models_that_share_train_as_before[fullshard]",),
    "torch's policy objects": ("surface_calls::test_torch_s_policy_objects_are_accepted",),
    "ZeRO-3": ("strategies::test_strategies[fullshard-ZeRO-3]",),
    "ZeRO-2": ("strategies::test_strategies[fullshard-ZeRO-2]",),
    "HSDP": ("strategies::test_strategies[fullshard-HSDP]",),
    "hpZ": ("strategies::test_strategies[fullshard-hpZ]",),
    "NO_SHARD": ("strategies::test_strategies[fullshard-NO_SHARD]",),
    "shard_placement_fn, any dim": ("shard_dims::test_uneven_dims_train_as_plain_training[{world}-none]",),
    "a mesh per parameter": ("strategies::test_a_mesh_per_parameter[fullshard]",),
    "tensor parallelism": ("strategies::test_tensor_parallelism[fullshard-False]",),
    "dp_mesh_dims": ("strategies::test_tensor_parallelism[fullshard-True]",),
    "ignored_params": ("conformance_basic::test_ignored_parameters_stay_as_they_are[{world}-fullshard]",),
    "mixed precision, its four fields": (
        "precision::test_the_fields_of_a_policy[fullshard-par=bfloat16-red=float32-cas=False]",
        "precision::test_the_fields_of_a_policy[fullshard-par=float16-red=float32-out=float32]",
    ),
    "float16 with GradScaler": ("precision::test_inf_on_one_shard_skips_on_all_ranks[fullshard]",),
    "several dtypes in a unit": ("precision::test_a_frozen_parameter_of_another_dtype[fullshard]",),
    "accumulation in the reduce dtype": (
        "conformance_training::test_accumulation_without_synchronisation[{world}-fullshard]",
    ),
    "CPU offload": (
        "offload::test_on_a_cpu_mesh_offload_changes_nothing[fullshard]",
        "offload::test_gradients_are_read_only_after_their_copies_are_complete",
    ),
    "explicit prefetch": ("surface_calls::test_prefetch_lists_have_an_effect[fullshard]",),
    "early unshard": ("conformance_basic::test_unshard_and_reshard[{world}-fullshard]",),
    "set_is_last_backward": ("surface_calls::test_set_is_last_backward[fullshard]",),
    "unused parameters": (
        "conformance_training::test_a_parameter_that_no_rank_used_has_no_gradient[{world}-fullshard]",
    ),
    "meta device": ("initialisation::test_what_was_forgotten_is_named_on_all_ranks_and_may_be_repaired[{world}]",),
    "non-persistent buffers": ("initialisation::test_buffers_without_data_are_computed_or_named[Attending-to_empty]",),
    "unit by unit": ("materialize::test_values_depend_on_the_seed_alone[Tied-{world}]",),
    "root before its children": ("conformance_basic::test_root_sharded_before_its_children[fullshard]",),
    "extensions": (
        "extensions::test_training_through_the_methods[fullshard-None-Master]",
        "extensions::test_training_through_the_methods[fullshard-None-OldMaster]",
    ),
    "state dicts": (
        "conformance_basic::test_state_dict_is_sharded_and_needs_no_communication[{world}-fullshard]",
        "state_dicts::test_the_next_steps_after_loading_are_those_of_plain_training[tied-fullshard]",
    ),
    "full_params": ("full_params::test_contexts_nest",),
    "copies are refused": ("state_dicts::test_copies_of_parameters_and_refusals_of_copies_of_models[fullshard]",),
    "tied weights": (
        "state_dicts::test_ties_survive_loading_saving_and_to_empty[fullshard]",
        "state::test_weights_tied_across_units_are_refused_with_both_places",
    ),
    "report": ("strategies::test_strategies[fullshard-ZeRO-3]",),
}
_PASSED = re.compile(r"^PASSED (.*)$", re.MULTILINE)


def _run(world: int, arguments: list[str]) -> tuple[set[str], str]:
    """Ids of the tests that passed, and what pytest wrote. AssertionError when one failed."""
    options = ["-q", "-rA", "-p", "no:cacheprovider", "--ranks=gloo", f"--world={world}"]
    child = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *arguments],
        cwd=ROOT,
        env={**os.environ, "HYPOTHESIS_PROFILE": "quick"},
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stdout[-8000:] + child.stderr[-2000:]
    return set(_PASSED.findall(child.stdout)), child.stdout


def _path(case: str, world: int) -> str:
    file, _, test = case.format(world=world).partition("::")
    return f"tests/threads/test_{file}.py::{test}"


@pytest.mark.slow
@pytest.mark.hang_after(600)
# Two ranks are what the other tests of this tier have; four take more than a minute.
@pytest.mark.parametrize("world", [1, *(pytest.param(world, marks=pytest.mark.slow) for world in (2, 4))])
def test_a_case_of_every_line(world: int) -> None:
    wanted = {line: [_path(case, world) for case in cases] for line, cases in LINES.items()}
    passed, output = _run(world, sorted({path for paths in wanted.values() for path in paths}))
    for line, paths in wanted.items():
        for path in paths:
            assert path in passed, f"{line}: {path} did not run\n{output}"


@pytest.mark.slow
@pytest.mark.sample(full=3)
@pytest.mark.hang_after(3000)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("part", range(20))
def test_the_tier_over_gloo(part: int, world: int) -> None:
    """The tests of the threads tier that ask for this number of ranks, or for any; with two, all of them. But for
    programs that have a test of their own over gloo."""
    passed, _ = _run(world, [f"--part={part}/20", "--deselect=tests/threads/test_legal.py", "tests/threads"])
    assert len(passed) > 20


def _in_memory_of_the_group(rank: int) -> list[torch.Tensor]:
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    for module in (*model, model):
        module.set_allocate_memory_from_process_group_for_comm(True)
    model(torch.full((2, 4), rank + 1.0)).square().sum().backward()
    return [parameter.grad.full_tensor() for parameter in model.parameters()]


def test_messages_in_memory_of_the_process_group_go_over_data_groups() -> None:
    """torch does not know a data group, so it cannot be asked for its backend."""
    plain = seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)))
    for rank in range(2):
        (plain(torch.full((2, 4), rank + 1.0)).square().sum() / 2).backward()
    for found in pool(2).run(_in_memory_of_the_group):
        for ours, theirs in zip(found, plain.parameters(), strict=True):
            assert theirs.grad is not None
            assert_close_to_tensor_max(ours, theirs.grad, 4)
