"""Every example in a docstring of the package runs and shows what it says."""

from __future__ import annotations

import doctest
import importlib

import pytest

from tests.harness.source import package_sources

EXAMPLES = [source.module for source in package_sources() if "\n>>> " in source.text or " >>> " in source.text]


def test_the_pure_rooms_have_examples() -> None:
    assert any(module.startswith("fullshard.layout") for module in EXAMPLES)


@pytest.mark.parametrize("module", EXAMPLES)
def test_examples(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0, "the examples stand where doctest does not look"
    assert result.failed == 0
