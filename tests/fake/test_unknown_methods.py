"""A method that another torch adds to its `FSDPModule` raises on our modules, by name: it would act on other state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed.fsdp as torch_fsdp
from torch import nn

import fullshard
from fullshard.api.classes import unknown_methods
from tests.harness.fake import fake_world


@pytest.fixture
def world() -> Iterator[None]:
    with fake_world(2):
        yield


class _Own(nn.Linear):
    def set_future(self, value: int) -> int:
        return value + 1


def test_a_method_that_torch_adds_tomorrow_raises(world: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Public, private, a static one and a property; a module's own method of that name stays its own."""
    calls: list[object] = []
    for name in ("set_future", "_set_future_privately"):
        monkeypatch.setattr(torch_fsdp.FSDPModule, name, lambda self, *args, **kw: calls.append(self), raising=False)
    monkeypatch.setattr(torch_fsdp.FSDPModule, "future_static", staticmethod(calls.append), raising=False)
    monkeypatch.setattr(torch_fsdp.FSDPModule, "future_property", property(calls.append), raising=False)

    # Classes of sharded modules are made once: a new one sees what torch has now.
    class Layer(nn.Linear):
        pass

    class Own(_Own):
        pass

    model: Any = fullshard.fully_shard(Layer(2, 2))
    for use in (
        lambda: model.set_future(True, recurse=False),
        lambda: model._set_future_privately(),
        lambda: model.future_static(1),
        lambda: model.future_property,
    ):
        with pytest.raises(
            NotImplementedError, match=r"FSDPLayer\.\w*future\w*: expected .* found .*; leave the call out"
        ):
            use()
    assert not calls
    own: Any = fullshard.fully_shard(Own(2, 2))
    assert own.set_future(1) == 2
    # What we know is ours as before.
    model.set_requires_gradient_sync(True)


def test_all_that_torch_has_is_known_or_raises(world: None) -> None:
    """Of the installed version: nothing that acts comes from torch's class."""
    model = fullshard.fully_shard(nn.Linear(2, 2))
    known = unknown_methods(fullshard.FSDPModule)
    assert known == {}, "another torch added methods: fullshard refuses them until it has them"
    for name, attribute in vars(torch_fsdp.FSDPModule).items():
        if callable(attribute):
            owner = next(cls for cls in type(model).__mro__ if name in vars(cls))
            assert owner is not torch_fsdp.FSDPModule, name
