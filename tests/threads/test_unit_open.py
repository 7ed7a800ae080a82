"""Weights read outside of their module's forward: in `unit_open` as in plain training, else an error that says so."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard import fully_shard, unit_open
from tests.harness.models import seeded
from tests.harness.threads import WORLD, run_ranks
from tests.threads.programs import WIDTH, batch, compare_gradients, shard
from tests.threads.programs import Model as Blocks
from tests.threads.programs import part as rows_of


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.body(self.table(tokens)))


class Fused(torch.autograd.Function):
    """Computes the gradients in forward, as fused cross-entropy does; nothing saves the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        out = x @ weight.t()
        ctx.save_for_backward(2 * out @ weight, 2 * out.flatten(0, -2).t() @ x.flatten(0, -2))
        return out.square().sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradients[0] * x, gradients[0] * weight


def direct(model: Any, x: Tensor) -> Tensor:
    return (x @ model.head.weight.t() + model.head.bias).square().sum()


def chunked(model: Any, x: Tensor) -> Tensor:
    parts = [F.linear(part, model.head.weight, model.head.bias).square().sum() for part in x.chunk(2)]
    return torch.stack(parts).sum()


def fused(model: Any, x: Tensor) -> Tensor:
    found: Tensor = Fused.apply(x, model.head.weight)  # type: ignore[no-untyped-call]
    return found + model.head.bias.square().sum()


def recomputed(model: Any, x: Tensor) -> Tensor:
    found: Tensor = checkpoint(direct, model, x, use_reentrant=False)
    return found


def with_its_forward(model: Any, x: Tensor) -> Tensor:
    """The head is also called as a module, in the same step."""
    return direct(model, x) + model.head(x).sum()


def opens(model: Any) -> Any:
    return unit_open(model.head)


def train(
    model: Any, loss_of: Callable[[Any, Tensor], Tensor], opening: Callable[[Any], Any], *, held: int = 0
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.arange(8).view(2, 4) % 7
    for step in range(4):
        for micro in range(held + 1):
            if held and isinstance(model, fullshard.FSDPModule):
                model.set_requires_gradient_sync(micro == held)
            x = model((tokens + step + micro) % 7)
            with opening(model):
                loss = loss_of(model, x)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def same(plain: nn.Module, model: nn.Module) -> None:
    for (name, a), b in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(b.full_tensor(), a, msg=name)  # type: ignore[attr-defined]


def sharded(**options: Any) -> Any:
    model = seeded(Model)
    for part in (model.table, model.body, model.head):  # type: ignore[union-attr]
        fully_shard(part, **options)
    return fully_shard(model, **options)


@pytest.mark.parametrize("loss_of", [direct, chunked, fused, with_its_forward])
@pytest.mark.parametrize("reshard", [True, False])
def test_a_weight_read_outside_of_its_forward_trains_as_plain(loss_of: Any, reshard: bool) -> None:
    def rank_fn(rank: int) -> None:
        plain, model = seeded(Model), sharded(reshard_after_forward=reshard)
        train(plain, loss_of, nullcontext)
        train(model, loss_of, opens)
        same(plain, model)
        assert model.head.weight.to_local().shape[0] == -(-7 // WORLD) or rank  # shards again

    run_ranks(WORLD, rank_fn)


def test_micro_batches_that_are_held() -> None:
    def rank_fn(rank: int) -> None:
        plain, model = seeded(Model), sharded()
        train(plain, chunked, nullcontext, held=2)
        train(model, chunked, opens, held=2)
        same(plain, model)

    run_ranks(WORLD, rank_fn)


def test_opened_inside_of_what_is_recomputed() -> None:
    def rank_fn(rank: int) -> None:
        def opened(model: Any, x: Tensor) -> Tensor:
            with unit_open(model.head):
                return direct(model, x)

        plain, model = seeded(Model), sharded()
        train(plain, recomputed, nullcontext)
        train(model, lambda m, x: checkpoint(opened, m, x, use_reentrant=False), nullcontext)
        same(plain, model)

    run_ranks(WORLD, rank_fn)


def test_a_head_of_the_root_and_a_tied_one() -> None:
    def rank_fn(rank: int) -> None:
        def tied() -> Any:
            model = Model()
            model.head.weight = model.table.weight
            return model

        for make in (Model, tied):
            plain: Any = seeded(make)
            model: Any = seeded(make)
            fully_shard(model.body)
            fully_shard(model)
            train(plain, direct, nullcontext)
            train(model, direct, unit_open)  # the root's unit has the head
            same(plain, model)

    run_ranks(WORLD, rank_fn)


def test_in_the_compute_dtype_and_without_gradients() -> None:
    policy = fullshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16)

    def rank_fn(rank: int) -> None:
        model = sharded(mp_policy=policy)
        x = model(torch.arange(4))
        with unit_open(model.head):
            assert model.head.weight.dtype is torch.bfloat16
            direct(model, x).backward()
        assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())
        with torch.no_grad():
            x = model(torch.arange(4))
            with unit_open(model.head):
                assert model.head.weight.shape == (7, 4)
                direct(model, x)

    run_ranks(WORLD, rank_fn)


def test_an_exception_inside_leaves_the_next_step_as_it_would_be() -> None:
    def after_a_forward(rank: int) -> None:
        plain, model = seeded(Model), sharded()
        x = model(torch.arange(4))
        with pytest.raises(KeyError, match="expected"), unit_open(model.head):
            direct(model, x)
            raise KeyError("expected")
        train(plain, direct, nullcontext)
        train(model, direct, opens)
        same(plain, model)

    run_ranks(WORLD, after_a_forward)


def test_what_it_refuses() -> None:
    def rank_fn(rank: int) -> None:
        model = sharded()
        with pytest.raises(ValueError, match=r"fully_shard was applied, found Sequential, which has 1 in it"):
            with unit_open(nn.Sequential(model.head)):
                pass
        with pytest.raises(ValueError, match="found Linear, with none in it"), unit_open(nn.Linear(2, 2)):
            pass
        with pytest.raises(TypeError, match="module"), unit_open(model.head.weight):
            pass
        model(torch.arange(4))
        with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
            with pytest.raises(RuntimeError, match=r"unit_open: .*saved-tensor hooks.*head"), unit_open(model.head):
                pass

    run_ranks(1, rank_fn)


# ---- without it ------------------------------------------------------------------------------------------------------


class Reads(Model):
    """Its forward reads the head's weight itself."""

    how = "attribute"

    def forward(self, tokens: Tensor) -> Tensor:
        x = super().forward(tokens)
        if self.how == "attribute":
            return x @ self.head.weight.t()
        return product(x, self.weights()[0])

    def weights(self) -> list[Tensor]:
        return list(self.head.parameters())


def product(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.t()


@pytest.mark.parametrize("how", ["attribute", "argument"])
def test_the_exception_names_parameter_unit_and_cures(how: str) -> None:
    def rank_fn(rank: int) -> None:
        model: Any = seeded(Reads)
        model.how = how
        for part in (model.table, model.body, model.head):
            fully_shard(part)
        fully_shard(model)
        with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor") as caught:
            model(torch.arange(4))
        (note,) = caught.value.__notes__
        assert "head.weight of unit head" in note and "body" not in note and "table" not in note, note
        assert "unit_open" in note and "register_fsdp_forward_method" in note

    run_ranks(WORLD, rank_fn)


def test_other_exceptions_have_no_note() -> None:
    def rank_fn(rank: int) -> None:
        model = sharded()
        with pytest.raises(IndexError) as caught:
            model(torch.tensor([9]))
        assert not hasattr(caught.value, "__notes__")

    run_ranks(1, rank_fn)


# ---- plain modules called outside of the forward of their unit -----------------------------------------------


class Towers(Blocks):
    """Plain modules inside plain modules, and methods that call them."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.ModuleDict({"body": nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh())})

    def _score(self, x: Tensor) -> Tensor:
        return self.head(x)

    def pieces(self, x: Tensor) -> Any:
        yield self.tower["body"](x)


def test_a_plain_module_called_directly() -> None:
    """An error of DTensor's, before the first forward, in the middle of a step and after it; the steps around it are
    what they would be."""
    torch.manual_seed(0)
    base = Towers()

    def calls(model: Any, tokens: Tensor) -> list[Callable[[], Any]]:
        x = torch.ones(2, WIDTH)
        return [
            lambda: model.embedding(tokens),
            lambda: model.layers[1].up(x),
            lambda: model.tower["body"](x),
            lambda: model._score(x),
            lambda: next(model.pieces(x)),
        ]

    def rank_main(rank: int) -> None:
        model: Any = shard(copy.deepcopy(base))
        reference: Any = copy.deepcopy(base)
        tokens = rows_of(batch(2, 0), rank)

        def refused() -> None:
            for call in calls(model, tokens):
                with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
                    call()

        refused()
        for step in range(2):
            loss = model(rows_of(batch(2, step), rank)).pow(2).mean()
            with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
                model.layers[0].down(torch.ones(2, 2 * WIDTH + 1))
            loss.backward()
            refused()
            for r in range(2):
                (reference(rows_of(batch(2, step), r)).pow(2).mean() / 2).backward()
            compare_gradients(model, reference, step)
        # What docs/surface.md says works.
        model.unshard()
        expected = reference.embedding(tokens)
        assert torch.equal(model.embedding(tokens), expected)
        model.reshard()
        with fullshard.full_params(model):
            assert torch.equal(model.embedding(tokens), expected)
        refused()

    run_ranks(2, rank_main)


def test_a_plain_module_that_is_a_unit_of_its_own_gathers() -> None:
    """What the message advises first; and the other one, for a module around it."""

    torch.manual_seed(0)
    base = Towers()

    def rank_main(rank: int) -> None:
        model: Any = copy.deepcopy(base)
        reference = copy.deepcopy(base)
        fullshard.fully_shard(model.embedding)
        shard(model)
        fullshard.register_fsdp_forward_method(model, "_score")
        x, tokens = torch.ones(2, WIDTH), rows_of(batch(2, 0), rank)
        with torch.no_grad():
            model(tokens)
        assert torch.equal(model.embedding(tokens), reference.embedding(tokens))
        assert torch.equal(model._score(x), reference.head(x))

    run_ranks(2, rank_main)
