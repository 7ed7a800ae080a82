"""`fullshard verify` raises no alarm on sound programs, each with several strategies and all exercises that apply.

`make test` runs a sample, `make test-full` a larger one, `make test-all` all.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fullshard.program import blocks_apart, find_program, shard_blocks
from fullshard.verify.applicable import Applicable
from fullshard.verify.setting import Setting
from fullshard.verify.strategy import parse_strategy
from tests.harness.sound_programs import SOUND
from tests.harness.verified import compare, record

CASES = [(name, strategy) for name, sound in SOUND.items() for strategy in sound.strategies]
# In families: modules of torch.nn, recipes, classes of transformers, adapters of peft.
LEAST = 60


def test_there_are_enough() -> None:
    assert sum(bool(sound.strategies) for sound in SOUND.values()) >= LEAST
    assert sum(sound.package == "transformers" for sound in SOUND.values()) >= 15
    assert all(len(sound.strategies) >= 5 for sound in SOUND.values() if sound.strategies)


@pytest.mark.sample(1, full=24)
@pytest.mark.parametrize(("name", "strategy"), CASES, ids=[f"{name}-{strategy}" for name, strategy in CASES])
def test_a_sound_program_is_equal(name: str, strategy: str, tmp_path: Path) -> None:
    if SOUND[name].package:
        pytest.importorskip(SOUND[name].package)
    entry, first = f"tests.harness.sound_programs:program:{name}", strategy == SOUND[name].strategies[0]
    setting = Setting(entry, "fullshard", parse_strategy(strategy), 2, 2, "cpu")
    exercises, reasons = Applicable(find_program(entry), torch.device("cpu"), 3).exercises(setting)
    assert set(reasons) == SOUND[name].without, reasons
    if not first:
        exercises = tuple(each for each in exercises if each != "another world")
    result = compare(tmp_path, record(tmp_path, strategy, entry=entry, exercises=exercises))
    assert result.verdict == "equal", result.difference


def test_default_units_are_apart() -> None:
    """Classes that models of transformers name may contain one another, or share weights with a head."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.again = Inner(), Inner()
            self.again.weight = self.inner.weight

    class Named(nn.Module):
        _no_split_modules = ("Embedding", "Outer", "Inner")

        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(3, 2)
            self.layers = nn.ModuleList(Outer() for _ in range(2))
            self.last = Inner()
            self.head = nn.Linear(2, 3, bias=False)
            self.head.weight = self.words.weight

    model = Named()
    assert blocks_apart(model) == [*model.layers, model.last]
    units: list[nn.Module] = []
    shard_blocks(model, units.append)
    assert units == [*model.layers, model.last, model]
