"""Every program of `programs.py` trains as its plain model does: gradients, their presence, and AdamW's parameters."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.behaviours import behaviour
from tests.harness.implementations import FULLSHARD, TORCH, Implementation
from tests.threads.programs import PROGRAMS, run_program

SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank": (1, {}),
    "2 ranks, accumulation": (2, {"accumulate": True}),
    "2 ranks, kept full": (2, {"reshard_after_forward": False}),
    "3 ranks, all freed": (3, {"reshard_after_forward": True}),
}
FOR_TORCH = "2 ranks, accumulation"  # one is enough: torch is here to show that the program is one that it runs

# What each program shows: (area, title).
BOTH = {
    "plain": ("training", "a loss on the output"),
    "two_losses": ("autograd", "two losses on one output"),
    "two_forwards_one_backward": ("autograd", "two forwards, then one backward"),
    "loss_on_an_intermediate_too": ("autograd", "a loss on the output and on an intermediate of a unit"),
    "outputs_in_structures": ("autograd", "units that take and return named tuples of dicts of lists"),
    "inputs_without_gradient": ("autograd", "units whose inputs need no gradient"),
    "no_grad_first": ("autograd", "a forward under `torch.no_grad` before the one that trains"),
    "unused_layer": ("gradients", "a unit that some steps do not use"),
    "recompute_inside": ("recomputation", "checkpoint inside a unit"),
    "recompute_inside_reentrant": ("recomputation", "checkpoint inside a unit, reentrant"),
    "recompute_outside": ("recomputation", "checkpoint around a unit"),
    "recompute_outside_reentrant": ("recomputation", "checkpoint around a unit, reentrant"),
    "twice_in_one_reentrant_segment": ("recomputation", "a unit used twice inside one reentrant checkpoint"),
    "shared_blocks": ("autograd", "units used twice in one forward"),
    "tied_weights": ("parameters", "weights tied inside a unit"),
    "frozen": ("gradients", "frozen parameters beside trained ones, and a frozen unit"),
    "freeze_every_other_step": ("gradients", "parameters frozen in every other step"),
    "detached_weight": ("gradients", "a weight that is detached in forward, and gets no gradient"),
    "returns_a_parameter": ("autograd", "a forward that returns a parameter"),
}
# The same, where torch 2.13 fails; and what makes the difference.
OURS = {
    "loss_on_an_intermediate_only": (
        "autograd",
        "a loss on an intermediate of a unit alone",
        "weights are gathered when autograd asks for them, not when an output's gradient arrives",
    ),
    "intermediate_of_a_saved_view": (
        "autograd",
        "the same, where a function with a backward of its own saved a view of the weight",
        "a saved view is known by the weight it is a view of",
    ),
    "outputs_in_objects": (
        "autograd",
        "units that return objects of your own",
        "outputs need not be found: weights are gathered when autograd asks for them",
    ),
    "edited_view_outputs": (
        "autograd",
        "outputs that are views, and are edited in place",
        "weights are gathered when autograd asks for them; torch's hooks on the output are lost",
    ),
    "gradient_penalty": (
        "autograd",
        "double backward: a gradient penalty",
        "a backward with `create_graph=True` keeps the weights that the next backward reads",
    ),
    "inference_mode_first": (
        "autograd",
        "a forward under `torch.inference_mode` before the first that trains",
        "what the first forward makes is made as ordinary tensors",
    ),
    "two_dtypes_in_a_unit": (
        "mixed precision",
        "parameters of two dtypes in one unit",
        "a unit has a group for each dtype",
    ),
}


def _named(name: str, area: str, title: str, reason: str = "") -> Any:
    mark = behaviour(
        f"trains as the plain model: {title}", area=area, torch="better" if reason else "same", reason=reason
    )
    return pytest.param(name, marks=mark, id=name)


def test_every_program_runs() -> None:
    assert [*BOTH, *OURS] == sorted(PROGRAMS, key=[*BOTH, *OURS].index)


# torch says so of a root that ends in a linear layer on more than two dims; nothing here edits its output.
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")
@pytest.mark.parametrize(
    ("setting", "impl"),
    [
        pytest.param(setting, FULLSHARD, marks=pytest.mark.slow if setting == "2 ranks, kept full" else ())
        for setting in SETTINGS
    ]
    + [pytest.param(FOR_TORCH, TORCH)],
    ids=str,
)
@pytest.mark.parametrize("name", [_named(name, *said) for name, said in BOTH.items()])
@pytest.mark.sample(2)
def test_equals_the_plain_model(name: str, setting: str, impl: Implementation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULLSHARD_CHECK", "1")
    world, options = SETTINGS[setting]
    run_program(name, world, impl=impl, **options)


@pytest.mark.sample(2)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", [_named(name, *said) for name, said in OURS.items()])
def test_equals_the_plain_model_where_torch_fails(
    name: str, setting: str, impl: Implementation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FULLSHARD_CHECK", "1")
    world, options = SETTINGS[setting]
    run_program(name, world, impl=impl, **options)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("communication", "world", "watch"),
    [
        ("auto", 3, "always"),
        ("torch", 3, "auto"),
        # The other half of the pairs.
        pytest.param("auto", 3, "auto", marks=pytest.mark.slow),
        pytest.param("torch", 3, "always", marks=pytest.mark.slow),
    ],
)
def test_strategies_and_watching_change_no_result(
    communication: str, world: int, watch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FULLSHARD_COMMUNICATION", communication)
    monkeypatch.setenv("FULLSHARD_WATCH", watch)
    for name in ("plain", "two_forwards_one_backward", "recompute_outside", "frozen"):
        run_program(name, world, accumulate=True)
