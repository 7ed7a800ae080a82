"""The class of the sharded parameters that users hold: what it does beyond a DTensor, and that it is one otherwise."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from fullshard import RanksDisagree, full_params, fully_shard
from tests.harness import tolerance
from tests.harness.behaviours import behaviour
from tests.harness.models import seeded
from tests.harness.threads import WORLD, run_ranks
from tests.threads.test_order import Asked, Training, ask_always


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        result: Tensor = self.head(x)
        return result


def sharded(**options: Any) -> Any:
    model: Any = seeded(Model)
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


BATCH = torch.linspace(-1, 1, 20).reshape(4, 5)


def rows(value: Tensor, like: Any) -> DTensor:
    return distribute_tensor(value, like.device_mesh, like.placements)


# ---- p.data = ... --------------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@behaviour(
    "a value that is assigned to the .data of a sharded parameter is refused by name, not lost: {value}",
    area="parameters",
    torch="none",
    reason="torch's DTensor keeps its own rows and says nothing",
)
@pytest.mark.parametrize("value", ["a product of it", "a plain tensor", "another dtype", "another placement"])
@pytest.mark.parametrize("kept", [False, True])
def test_assigned_data_is_refused(value: str, kept: bool) -> None:
    """At the next forward, state dict or `full_params`, also where full parameters stay after a forward; the parameter
    is what it was, and trains on."""
    values: dict[str, Callable[[Any], Tensor]] = {
        "a product of it": lambda p: p.data * 0.5,
        "a plain tensor": lambda p: torch.zeros(5, 5),
        "another dtype": lambda p: p.data.double(),
        "another placement": lambda p: distribute_tensor(torch.zeros(5, 5), p.device_mesh, [Replicate()]),
    }
    looks: tuple[Callable[[Any], Any], ...] = (
        lambda model: model(BATCH),
        lambda model: model.state_dict(),
        lambda model: full_params(model).__enter__(),
    )

    def job(rank: int) -> None:
        model, other = sharded(reshard_after_forward=not kept), sharded(reshard_after_forward=not kept)
        for step in range(2):
            for look in looks:
                p = model.layers[1].weight
                p.data = values[value](p)
                with pytest.raises(
                    RuntimeError, match=r"(^|\.)weight: expected values that .*\.data.*p\.copy_"
                ) as error:
                    look(model)
                assert str(error.value).startswith("layers.1.") or not step
                for each in (model, other):
                    with torch.no_grad():
                        each(BATCH)
            for each in (model, other):
                each(BATCH).square().sum().backward()
                torch.optim.SGD(each.parameters(), lr=0.1).step()
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine.to_local(), theirs.to_local()) and mine.dtype is torch.float32

    run_ranks(WORLD, job)


@behaviour(
    "`p.data *= x` of a sharded parameter, which writes its rows, is what the model computes with",
    area="parameters",
    torch="equal",
)
def test_data_written_in_place() -> None:
    """And what has the rows of the parameter anyway may be assigned."""

    def job(rank: int) -> None:
        model, plain = sharded(), seeded(Model)
        for _ in range(2):
            for each in (model, plain):
                each.layers[1].weight.data *= 0.5
                each.head.bias.data = each.head.bias.data
            with torch.no_grad():
                tolerance.assert_close(model(BATCH), plain(BATCH))

    run_ranks(WORLD, job)


# ---- it is a DTensor -----------------------------------------------------------------------------------------------


def test_copies_and_pickles_are_dtensors() -> None:
    """Which torch loads without this package; marks and hooks of the parameter are what they are for a DTensor."""

    def job(rank: int) -> None:
        model = sharded()
        p = model.layers[0].weight
        p.mark = "mine"
        assert isinstance(p, nn.Parameter) and isinstance(p, DTensor)
        made = copy.deepcopy([p, p])
        assert made[0] is made[1] and isinstance(made[0], nn.Parameter)
        assert {type(value) for value in (p, p.detach(), p.data, made[0])} == {DTensor}
        assert made[0].mark == "mine" and torch.equal(made[0].to_local(), p.to_local()) and made[0].requires_grad
        file = io.BytesIO()
        torch.save({"p": p, "again": p, "detached": p.detach()}, file)
        assert b"fullshard" not in file.getvalue()
        loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
        assert type(loaded["p"]) is DTensor and loaded["p"] is loaded["again"] and loaded["p"].mark == "mine"
        assert torch.equal(loaded["p"].to_local(), p.to_local())
        wrapped = nn.Parameter(p)
        assert wrapped.data_ptr() == p.data_ptr() and torch.equal(wrapped.to_local(), p.to_local())
        for value in (
            p.clone(),
            p * 2,
            torch.zeros_like(p),
            p.to(torch.float64),
            p + p,
            p[:1] if WORLD == 1 else p.sum(),
        ):
            assert type(value) is DTensor

    run_ranks(WORLD, job)


@pytest.mark.parametrize("how", ["to", "load_state_dict(assign=True)", "swap_tensors"])
def test_what_replaces_a_parameter_is_one_again(how: str) -> None:
    def job(rank: int) -> None:
        model = sharded()
        model(BATCH)
        p = model.layers[0].weight
        if how == "to":
            model.double()
        elif how == "swap_tensors":
            torch.utils.swap_tensors(p, nn.Parameter(rows(torch.ones(5, 5), p)))
        else:
            model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()}, assign=True)
        model(BATCH.double() if how == "to" else BATCH)
        model.layers[0].weight.data = torch.zeros(5, 5)
        with pytest.raises(RuntimeError, match=r"^layers\.0\.weight: expected"):
            model(BATCH.double() if how == "to" else BATCH)

    run_ranks(WORLD, job)


def test_who_keeps_a_parameter_keeps_no_model() -> None:
    def job(rank: int) -> None:
        model = sharded()
        kept, gone = model.layers[0].weight, weakref.ref(model.layers[1])
        del model
        gc.collect()
        assert gone() is None and kept.to_local().shape == (5, 5)

    run_ranks(1, job)


# ---- outside of its module -----------------------------------------------------------------------------------------


USES = (
    "x @ w",
    "x @ w.T",
    "w @ x.T",
    "x + w",
    "w - x",
    "x * w",
    "w / x",
    "x @ w.t()",
    "F.linear(x, w)",
    "F.linear(x, weight=w.detach())",
    "F.embedding(torch.zeros(2, dtype=torch.long), w)",
    "torch.cat([x, w])",
    "torch.addmm(x, x, w)",
    "torch.einsum('ij,jk->ik', x, w)",
    "x + w.view(5, 5)",
    "torch.nn.functional.mse_loss(w, x)",
)


def test_a_sharded_weight_beside_a_plain_tensor_is_refused() -> None:
    """By DTensor, in its words: no operation passes through code of ours (ADR 0016)."""

    def job(rank: int) -> None:
        model = sharded()
        x, F = torch.ones(5, 5), nn.functional
        model(BATCH)
        w = model.layers[1].weight
        for use in USES:
            with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
                eval(use, {"x": x, "w": w, "F": F, "torch": torch})
            with full_params(model):
                eval(use, {"x": x, "w": model.layers[1].weight, "F": F, "torch": torch})
        # With a number, and with its like, it is what DTensor makes of it.
        assert torch.equal((2 * w - w / 0.5 + 1).full_tensor(), torch.ones(5, 5))
        assert type(w + w) is DTensor and w.__add__("no") is NotImplemented

    run_ranks(WORLD, job)


# ---- gathers by hand -----------------------------------------------------------------------------------------------


def test_full_params_ask_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full tensors, which are DTensor's, ask nothing."""
    asked = Asked(monkeypatch)

    def job(rank: int) -> list[int]:
        training = Training(rank)
        counts = []
        for _ in range(5):
            training.step()
            values = {name: value.full_tensor() for name, value in training.model.state_dict().items()}
            with full_params(training.model):
                for name, p in training.model.named_parameters():
                    assert torch.equal(p, values[name])
            counts.append(asked.count)
        return counts

    for counts in run_ranks(WORLD, job):
        assert counts[2] == counts[-1] and (counts[0] > 0 or WORLD == 1)


def test_a_replica_may_gather_by_itself() -> None:
    """Nothing goes from one replica to the other then."""

    def job(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = sharded(mesh=mesh)
        wanted = seeded(Model).layers[1].weight
        for _ in range(2):
            if rank in (0, 1):
                assert torch.equal(model.layers[1].weight.full_tensor(), wanted)
            model(BATCH)

    run_ranks(4, job)


def test_behind_a_failure_all_may_gather_first() -> None:
    """Before they run a forward again: they meet there."""

    def job(rank: int) -> None:
        training = Training(rank)
        training.step()
        broken = training.model.layers[2].register_forward_pre_hook(_raise)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                training.step()
        broken.remove()
        training.optimizer.zero_grad()
        with full_params(training.model):
            before = [p.clone() for p in training.model.parameters()]
        training.step()
        after = [p.full_tensor() for p in training.model.parameters()]
        assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))

    run_ranks(WORLD, job)


def _raise(*_: object) -> None:
    raise ZeroDivisionError


def test_guard_off_compares_no_gathers_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    ask_always(monkeypatch)
    monkeypatch.setenv("FULLSHARD_GUARD", "off")
    asked = Asked(monkeypatch)

    def job(rank: int) -> int:
        model = sharded()
        with full_params(model):
            pass
        model(BATCH)
        with full_params(model):
            pass
        return asked.count

    assert set(run_ranks(WORLD, job)) == {0}
    monkeypatch.delenv("FULLSHARD_GUARD")

    def apart(rank: int) -> None:
        model = sharded()
        with pytest.raises(RanksDisagree, match=r"root|layers"), full_params(model if rank else model.layers[0]):
            pass

    run_ranks(2, apart)


def test_a_weight_of_another_unit_in_a_forward_is_refused() -> None:
    """The usual way to get there: an output layer that uses the embedding's weight by itself."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.last = nn.Embedding(6, 5), nn.Linear(5, 5)

        def out(self, x: Any) -> Any:
            return nn.functional.linear(self.last(x), self.embedding.weight)

        def forward(self, tokens: Any) -> Any:
            return self.out(self.embedding(tokens))

    def job(rank: int) -> None:
        model: Any = seeded(Reads)
        fully_shard(model.embedding)
        fully_shard(model)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
                model(torch.zeros(2, dtype=torch.long))

    run_ranks(WORLD, job)


# ---- a backward for parameters by themselves -----------------------------------------------------------------------


@behaviour(
    "a backward for sharded parameters by themselves, which would train nothing, is an error at the step: {what}",
    area="errors",
    torch="none",
    reason="torch trains nothing and says nothing",
)
@pytest.mark.parametrize("what", ["loss.backward(inputs=ps)", "torch.autograd.backward([loss], inputs=[x, *ps])"])
def test_a_backward_for_parameters_alone_is_an_error_at_the_step(what: str) -> None:
    """In the first step and later; the step after that is what it would have been."""

    def job(rank: int) -> None:
        model, untouched = sharded(), sharded()
        optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, untouched))
        x = BATCH.clone().requires_grad_()
        ps = list(model.parameters())
        for _ in range(2):
            loss = model(x).sum()
            eval(what, {"loss": loss, "ps": ps, "torch": torch, "x": x})
            with pytest.raises(RuntimeError, match=r"^SGD\.step: expected gradients.*layers\.0\.(weight|bias)"):
                optimizer.step()
            for each, its in ((model, optimizer), (untouched, other)):
                each(BATCH).square().sum().backward()
                its.step()
                its.zero_grad()
            for mine, theirs in zip(model.parameters(), untouched.parameters(), strict=True):
                assert torch.equal(mine.full_tensor(), theirs.full_tensor())

    run_ranks(WORLD, job)


def test_steps_without_a_backward_of_the_model_are_legal_where_others_have_gradients() -> None:
    """Of two models, of which the loss reaches one; no forward at all; a closure that does it; an evaluation."""

    def job(rank: int) -> None:
        first, second = sharded(), sharded()
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
        optimizer.step()
        first(BATCH)
        second(BATCH).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            first(BATCH)
        optimizer.step()
        alone = torch.optim.SGD(first.parameters(), lr=0.1)
        first(BATCH)
        second(BATCH).sum().backward()
        alone.step()

        def closure() -> torch.Tensor:
            loss = third(BATCH).sum()
            loss.backward()
            return loss

        third = sharded()
        torch.optim.SGD(third.parameters(), lr=0.1).step(closure)

    run_ranks(WORLD, job)


def test_backwards_that_reach_a_sharded_parameter_are_autograds() -> None:
    """A penalty on the shards is a graph of the shards; what is no parameter of ours is asked for as ever."""

    def job(rank: int) -> None:
        model = sharded()
        w, v = model.layers[0].weight, model.layers[1].weight
        full = w.detach().full_tensor()
        (gradient,) = torch.autograd.grad(w.square().sum(), w)
        assert torch.equal(gradient.full_tensor(), 2 * full)
        (itself,) = torch.autograd.grad(w, w, w.detach())
        assert torch.equal(itself.full_tensor(), full)
        turned = w.t()
        (of_view,) = torch.autograd.grad(turned.square().sum(), turned)
        assert torch.equal(of_view.full_tensor(), 2 * full.t())
        unused = torch.autograd.grad(w.square().sum(), [w, v], allow_unused=True)
        assert unused[1] is None
        for times in (1, 2):
            w.square().sum().backward(inputs=[w])
            assert torch.equal(w.grad.full_tensor(), 2 * times * full)
        x = BATCH.clone().requires_grad_()
        (of_input,) = torch.autograd.grad(model(x).sum(), x)
        (expected,) = torch.autograd.grad(seeded(Model)(x).sum(), x)
        assert torch.equal(of_input, expected)
        plain = nn.Linear(2, 2)
        with pytest.raises(RuntimeError, match="not have been used in the graph"):
            torch.autograd.grad(x.sum(), list(plain.parameters()))

    run_ranks(WORLD, job)
