"""What the environment and `use_options` say about the engine, and that roots are made of it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from fullshard import fully_shard
from fullshard.engine import unit_of
from fullshard.policy import Options, use_options
from tests.harness.fake import fake_world


@pytest.mark.parametrize("variable", ["FULLSHARD_GAURD", "FULLSHARD_AGREE", "FULLSHARD_PREFETCH", "FULLSHARD_"])
def test_a_variable_that_is_none_is_named(variable: str) -> None:
    """A misspelt one, or one of another version: it would have no effect."""
    with pytest.raises(ValueError, match=f"^{variable}: expected one of .*FULLSHARD_GUARD.*none of them; correct its"):
        Options.current({variable: "1", "FULLSHARD_GUARD": "off"})
    assert Options.current({variable: "", "FULLSHARD": "1"}) == Options()


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("FULLSHARD_COMMUNICATION", "fast", "auto, torch, all-to-all, one-level, two-levels, found 'fast'"),
        ("FULLSHARD_WATCH", "never", "auto, always, found 'never'"),
        ("FULLSHARD_REDUCE_DTYPE", "float32", "grad_dtype, param_dtype, found 'float32'"),
        ("FULLSHARD_CHECK", "yes", "a whole number >= 0, found 'yes'"),
    ],
)
def test_wrong_values_are_named(variable: str, value: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"^{variable}: expected .*{text}$"):
        Options.current({variable: value})


def test_the_environment_is_read() -> None:
    environ = {"FULLSHARD_COMMUNICATION": "torch", "FULLSHARD_WATCH": "always", "FULLSHARD_CHECK": "1"}
    environ["FULLSHARD_REDUCE_DTYPE"] = "param_dtype"
    assert Options.current(environ) == Options(
        communication="torch", watch="always", reduce_default="param_dtype", check=True
    )


def test_use_options_goes_before_the_environment_and_the_innermost_before_others() -> None:
    environ = {"FULLSHARD_COMMUNICATION": "torch", "FULLSHARD_WATCH": "always"}
    with use_options(communication="all-to-all", prefetch_depth=3):
        with use_options(prefetch_depth=0):
            found = Options.current(environ)
        assert Options.current(environ).prefetch_depth == 3
    assert found == Options(prefetch_depth=0, communication="all-to-all", watch="always")
    assert Options.current({}) == Options()


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"prefetch_depth": -1}, "prefetch_depth: expected a whole number >= 0, found -1"),
        ({"prefetch_depth": True}, "prefetch_depth: expected a whole number >= 0, found True"),
        ({"reductions_in_flight": 0}, "reductions_in_flight: expected a whole number >= 1, found 0"),
        ({"communication": "hierarchical"}, "communication: expected one of .*, found 'hierarchical'$"),
        ({"watch": "never"}, "watch: expected one of auto, always"),
        ({"check": 1}, "check: expected True or False, found 1"),
    ],
)
def test_use_options_refuses_wrong_values(changes: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=f"^{error}"), use_options(**changes):
        pass
    with pytest.raises(TypeError, match="unknown"), use_options(unknown=1):
        pass
    assert Options.current({}) == Options()


def test_roots_that_form_inside_have_them_and_keep_them() -> None:
    """In other threads, too, as the ranks of a test are; a root that formed before stays as it was."""

    def options_of(model: Any) -> Options:
        model(torch.ones(1, 4)).sum().backward()
        unit = unit_of(model)
        assert unit is not None and unit.root is not None
        options: Options = unit.root.options
        return options

    with fake_world(2):
        before, after = (fully_shard(nn.Linear(4, 4)) for _ in range(2))
        first = options_of(before)
        with use_options(prefetch_depth=4, reductions_in_flight=3):
            assert options_of(before) is first
            chosen = options_of(after)
            read: list[Options] = []
            thread = threading.Thread(target=lambda: read.append(Options.current()))
            thread.start()
            thread.join()
        assert options_of(after) is chosen
    assert read == [chosen]
    assert (chosen.prefetch_depth, chosen.reductions_in_flight, first.prefetch_depth) == (4, 3, 1)


def test_on_a_device_one_send_buffer_exists_at_a_time() -> None:
    assert Options().send_buffers_on("cuda") == 1 and Options().send_buffers_on("cpu") is None
