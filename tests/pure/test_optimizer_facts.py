"""What a step of an optimizer says of itself: the same on ranks that do the same, and no value of a device is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullshard.agree import calls
from fullshard.agree.calls import OptimizerFacts, listed, text_of

NAMES = ("a", "b", "c")


class Rank:
    """Three parameters, and the facts of an optimizer of them. `groups`: by names."""

    def __init__(self, *groups: str, lr: Any = 0.1, kind: Any = torch.optim.SGD, **options: Any) -> None:
        self.parameters = {name: nn.Parameter(torch.ones(2)) for name in NAMES}
        given = [{"params": [self.parameters[name] for name in group], "lr": lr} for group in groups]
        self.optimizer = kind(given, **options)
        self.facts = self.taken()
        self.backward()

    def taken(self) -> OptimizerFacts:
        return OptimizerFacts(self.optimizer, {id(p): ("mesh", name) for name, p in self.parameters.items()})

    def backward(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = torch.ones(2)

    def step(self) -> dict[str, str]:
        self.optimizer.step()
        return self.told()

    def told(self) -> dict[str, str]:
        changes = calls.changes_parameters(self.optimizer.param_groups)
        done = list(self.facts.stepped(self.optimizer, changes=changes).values())
        return {fact.name: fact.value for call in done for fact in call.facts}


def test_the_order_of_groups_and_of_parameters_is_no_difference() -> None:
    one, other = Rank("a", "bc"), Rank("cb", "a")
    for rank in (one, other):
        rank.optimizer.param_groups[rank is other]["lr"] = 0.3  # that of `a`
    assert one.step() == other.step()
    assert one.told()["lr of group 0 of the optimizer"] == "0.3"
    assert one.told()["lr of group 1 of the optimizer"] == "0.1"
    # Other parameters, and another grouping of them, are.
    listed_as = "parameters of the optimizer"
    assert len({Rank(*groups).step()[listed_as] for groups in (("ab",), ("ac",), ("a", "b"), ("abc",))}) == 4


def test_how_a_step_is_computed_is_no_difference() -> None:
    plain = Rank("abc").step()
    for how in ("foreach", "differentiable", "fused"):
        assert Rank("abc", **{how: True}).told() == plain, how


def test_what_changed_is_told_at_once_and_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, made = Rank("a", "bc"), []
    assert rank.step() == rank.step() | {"state of the optimizer": "of 0 parameters"}
    monkeypatch.setattr(calls, "text_of", lambda value: (made.append(value), text_of(value))[1])
    rank.optimizer.param_groups[1]["lr"] = 0.2
    assert rank.step()["lr of group 1 of the optimizer"] == "0.2" and made[0] == 0.2
    del made[:]
    assert rank.step() and not made, "put together once"
    (part,) = rank.facts.parts.values()
    assert part.written() is part.written(), "put together once"


def test_an_optimizer_that_got_other_parameters_is_another_one() -> None:
    rank = Rank("ab")
    assert rank.facts.holds(rank.optimizer)
    rank.optimizer.param_groups[0]["params"][1] = rank.parameters["c"]
    assert not rank.facts.holds(rank.optimizer)


@pytest.mark.parametrize("rate", [0.0, torch.tensor(0.0)])
def test_a_step_with_a_rate_of_zero_is_none(rate: Any) -> None:
    rank = Rank("abc", lr=rate)
    assert rank.step() == {}
    rank.optimizer.param_groups[0]["lr"] = 0.1
    assert rank.step()


def test_state_and_its_counter() -> None:
    rank, said = Rank("ab", kind=torch.optim.Adam), []

    def step() -> None:
        said.append(rank.step()["state of the optimizer"])

    step()
    step()
    rank.optimizer.load_state_dict(rank.optimizer.state_dict())
    step()
    step()
    del rank.optimizer.state[rank.parameters["b"]]
    rank.told()
    said.append(rank.told()["state of the optimizer"])
    for state in rank.optimizer.state.values():
        state["step"].fill_(0)
    step()
    assert said == [
        "of 2 parameters, at step 1",
        "of 2 parameters, one step further",
        "of 2 parameters, at step 3, replaced since the last step",
        "of 2 parameters, one step further",
        "of 1 parameters, at step 4",
        "of 2 parameters, at step 1",
    ]


def test_gradients_that_were_written_on_one_rank_alone() -> None:
    name = "gradients that the optimizer took"
    one, other = Rank("abc"), Rank("abc")
    assert one.told()[name] == other.told()[name]
    gradient = one.parameters["b"].grad
    assert gradient is not None
    gradient.mul_(0.5)
    assert one.told()[name] != other.told()[name] and one.told()[name].startswith("b written")


def test_no_value_of_a_device_is_read() -> None:
    """Of a tensor on the meta device there is none."""
    rate = torch.empty((), device="meta")
    assert text_of(rate) == calls._number_of(rate) == "a tensor on meta"
    assert calls.changes_parameters([{"lr": rate}])
    assert calls._counter({"step": rate}) is None
    state: dict[str, Tensor] = {"step": torch.tensor(3.0)}
    assert calls._counter(state) == 3.0


def test_of_many_names_a_digest_covers_the_rest() -> None:
    assert listed("dcba") == "a, b, c, d"
    assert listed("fedcba") == listed("abcdef") != listed("abcdeg")
