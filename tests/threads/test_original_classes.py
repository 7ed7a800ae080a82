"""The class of a sharded module: originals that begin with a mixin, and blocks in which modules have their own."""

from __future__ import annotations

import collections.abc
import contextlib
import threading
from abc import ABC, ABCMeta, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

import fullshard
from fullshard import FSDPModule, fully_shard
from fullshard.api import original_class
from fullshard.api.classes import sharded_class
from tests.harness.models import Trained, adamw, assert_same_training, collect, seeded
from tests.harness.threads import run_ranks

T = TypeVar("T")


class Scored(ABC):
    """A mixin as many projects have it, with an abstract method."""

    @abstractmethod
    def score(self) -> str: ...


class Registered(ABCMeta):
    """A metaclass that counts the classes it makes."""

    made: list[str] = []

    def __new__(mcs, name: str, bases: tuple[type, ...], members: dict[str, Any]) -> Any:
        mcs.made.append(name)
        return super().__new__(mcs, name, bases, members)


class Forwards(Protocol):
    def forward(self, x: Tensor) -> Tensor: ...


class Slotted:
    __slots__ = ("note",)


class Body(nn.Module):
    """(n, 5) -> (n, 5)"""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.norm = nn.LayerNorm(5)

    def score(self) -> str:
        return "body"

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.norm(self.linear(x)) + x
        return output


class WithABC(Scored, Body):
    def score(self) -> str:
        return f"abc of {super().score()}"  # type: ignore[safe-super]


class WithGeneric(Generic[T], Body): ...


class WithProtocol(Forwards, Body):
    def __init__(self) -> None:
        Body.__init__(self)

    def forward(self, x: Tensor) -> Tensor:
        return Body.forward(self, x)


class WithCollection(collections.abc.Hashable, Body):
    def __hash__(self) -> int:
        return id(self)


class WithMetaclass(Scored, Body, metaclass=Registered):
    def score(self) -> str:
        return "registered"


class WithSlots(Slotted, Body): ...


@dataclass(eq=False)
class WithFields(Scored, Body):
    """Its fields are its arguments."""

    width: int = 5

    def __post_init__(self) -> None:
        Body.__init__(self)

    def score(self) -> str:
        return f"fields of {super().score()}"  # type: ignore[safe-super]


class Listed:
    """A registry of its subclasses, as many projects have."""

    names: ClassVar[list[str]] = []

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        Listed.names.append(cls.__name__)


class WithRegistry(Listed, WithABC): ...


class WithSize(collections.abc.Sized, Body):
    """False, as an empty list is."""

    def __len__(self) -> int:
        return 0


class MixinLast(Body, Scored): ...


KINDS: list[type[Body]] = [
    *(WithABC, WithGeneric, WithProtocol, WithCollection, WithMetaclass),  # torch's fully_shard refuses these
    *(WithFields, WithRegistry, WithSize),
    *(WithSlots, MixinLast, Body),
]


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def trained(model: nn.Module, batch_of: Callable[[int], Tensor]) -> Trained:
    optimizer, losses = adamw(model.parameters()), []
    for step in range(2):
        loss = model(batch_of(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return collect(model, optimizer, losses if not isinstance(model, FSDPModule) else ())


@pytest.mark.sample(6)
@pytest.mark.parametrize("kind", KINDS)
def test_a_class_that_begins_with_a_mixin_is_sharded_and_trains_as_the_plain_one(kind: type[Body]) -> None:
    plain = seeded(lambda: nn.Sequential(kind(), kind()))
    expected = trained(plain, lambda step: torch.cat([batch(rank, step) for rank in range(2)]))

    def rank_main(rank: int) -> Trained:
        model = seeded(lambda: nn.Sequential(kind(), kind()))
        fully_shard(model[0])
        fully_shard(model[1])
        fully_shard(model)
        found = trained(model, lambda step: batch(rank, step))
        block = model[0]
        assert type(block) is type(model[1]) and type(block).__name__ == f"FSDP{kind.__name__}"
        for base in (kind, FSDPModule, TorchFSDPModule, nn.Module):
            assert isinstance(block, base)
        # dynamo and others find the original at a fixed place of the order.
        assert type(block).__mro__[FSDPModule._orig_cls_mro_index] is kind
        assert type(block).reshard is FSDPModule.reshard and type(block)._apply is FSDPModule._apply
        assert block.score() == kind().score()
        assert type(type(block)()) is kind  # as slicing a container makes modules
        return found

    for found in run_ranks(2, rank_main):
        assert_same_training(found, expected)


def test_threads_that_shard_a_class_at_one_moment_give_it_one_class() -> None:
    both = threading.Barrier(2)

    class Meets(nn.Module):
        """Making a class below it waits until a second thread makes one too, or, if none may, a moment."""

        def __init_subclass__(cls) -> None:
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.5)

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(sharded_class, [Meets, Meets])
    assert first is second


def test_a_class_below_a_sharded_one_keeps_the_order_of_its_methods() -> None:
    def rank_main(rank: int) -> None:
        model: Any = fully_shard(WithABC())

        class Below(type(model)):  # type: ignore[misc]
            ...

        assert Below.__mro__[1:] == type(model).__mro__

    run_ranks(1, rank_main)


def test_a_class_that_changes_the_memory_of_its_objects_is_still_refused() -> None:
    class Odd(Body):
        @property  # type: ignore[misc]
        def __class__(self) -> type:
            return Odd

    def rank_main(rank: int) -> None:
        with pytest.raises(TypeError, match="put it into a module of your own"):
            fully_shard(Odd())

    run_ranks(1, rank_main)


# ---- blocks with the originals ---------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(WithABC() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_in_a_block_modules_have_their_original_classes_and_compute_as_before() -> None:
    def rank_main(rank: int) -> None:
        model: Any = seeded(Model)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        x = batch(rank, 0)
        sharded, expected = [type(module) for module in model.modules()], model(x)
        with fullshard.original_classes(model):
            assert type(model) is Model and {type(block) for block in model.blocks} == {WithABC}
            assert original_class(model) is Model
            with fullshard.original_classes(model.blocks):
                assert type(model.blocks[1]) is WithABC
            assert type(model.blocks[1]) is WithABC
            assert torch.equal(model(x), expected)
            model(x).sum().backward()
            assert all(p.grad is not None for p in model.parameters())
        assert [type(module) for module in model.modules()] == sharded
        assert original_class(model) is Model and original_class(model.blocks) is nn.ModuleList
        with pytest.raises(KeyError), fullshard.original_classes(model):
            raise KeyError("in the block")
        assert [type(module) for module in model.modules()] == sharded
        with pytest.raises(TypeError, match="module"), fullshard.original_classes([model]):  # type: ignore[arg-type]
            pass

    run_ranks(2, rank_main)
