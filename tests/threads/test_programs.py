"""Every program of `programs.py` trains as its plain model does: gradients, their presence, and AdamW's parameters."""

from __future__ import annotations

from typing import Any

import pytest

from tests.threads.programs import PROGRAMS, run_program

SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank": (1, {}),
    "2 ranks, accumulation": (2, {"accumulate": True}),
    "2 ranks, kept full": (2, {"reshard_after_forward": False}),
    "3 ranks, all freed": (3, {"reshard_after_forward": True}),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_equals_the_plain_model(name: str, setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULLSHARD_CHECK", "1")
    world, options = SETTINGS[setting]
    run_program(name, world, **options)


@pytest.mark.parametrize("communication", ["auto", "torch"])
@pytest.mark.parametrize("watch", ["always", "never"])
def test_strategies_and_watching_change_no_result(
    communication: str, watch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FULLSHARD_COMMUNICATION", communication)
    monkeypatch.setenv("FULLSHARD_WATCH", watch)
    for name in ("plain", "two_forwards_one_backward", "recompute_outside", "frozen"):
        run_program(name, 3, accumulate=True)
