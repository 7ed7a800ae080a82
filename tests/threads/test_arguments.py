"""What a forward writes into its arguments reaches the caller, also where the policy casts a tensor in them.

The oracle is the same model without units, in float32: the same writes, in the same order.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from fullshard import fully_shard
from tests.harness.models import seeded
from tests.harness.threads import WORLD, run_ranks

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


class Layer(nn.Module):
    """Hands `argument` to `write`, with what it computed."""

    def __init__(self, index: int, write: Callable[..., Any]) -> None:
        super().__init__()
        self.index, self.write = index, write
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, argument: Any = None, **more: Any) -> Tensor:
        x = self.linear(x)
        self.write(self.index, x, argument, **more)
        return torch.tanh(x)  # recomputation reaches it


class Model(nn.Module):
    def __init__(self, write: Callable[..., Any], depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(index, write) for index in range(depth))

    def forward(self, x: Tensor, argument: Any = None, **more: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x, argument, **more)
        return x


def sharded(write: Callable[..., Any], *, root: bool = True) -> nn.Module:
    model = seeded(lambda: Model(write))
    for layer in model.get_submodule("layers").children():
        fully_shard(layer, mp_policy=POLICY)
    return fully_shard(model, mp_policy=POLICY if root else MixedPrecisionPolicy())


def both(write: Callable[..., Any], make: Callable[[], Any], look: Callable[[Any], Any], *, root: bool = True) -> None:
    """What `look` finds in the argument after a forward is the same with and without units."""

    def rank_fn(rank: int) -> None:
        expected, found = make(), make()
        seeded(lambda: Model(write))(torch.ones(2, 4), expected)
        sharded(write, root=root)(torch.ones(2, 4), found)
        assert look(found) == look(expected)

    run_ranks(1, rank_fn)


# ---- lists -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("root", [True, False], ids=["root casts", "each layer casts"])
def test_what_each_layer_appends_to_a_list_arrives(root: bool) -> None:
    table = torch.zeros(3)

    def write(index: int, x: Tensor, aux: list[Any]) -> None:
        aux.append(x.float().mean())

    def rank_fn(rank: int) -> None:
        model = sharded(write, root=root)
        aux = [table]
        model(torch.ones(2, 4), aux)
        assert len(aux) == 4
        assert aux[0] is table
        sum(aux[1:]).backward()  # type: ignore[union-attr]
        assert all(parameter.grad is not None for parameter in model.parameters())

    run_ranks(WORLD, rank_fn)


def test_a_list_is_changed_in_every_way() -> None:
    def write(index: int, x: Tensor, items: list[Any]) -> None:
        if index == 0:
            items.insert(0, "first")
            items.append(items[1])  # the caller's own tensor again
        elif index == 1:
            items.remove("gone")
        else:
            items.reverse()

    def look(items: list[Any]) -> Any:
        return [(item.dtype, item.shape) if isinstance(item, Tensor) else item for item in items]

    both(write, lambda: [torch.zeros(3), "gone", torch.zeros(2)], look)
    both(write, lambda: [torch.zeros(3), "gone", torch.zeros(2)], look, root=False)


def test_an_emptied_list_is_empty() -> None:
    both(lambda index, x, items: items.clear(), lambda: [torch.zeros(3), 1], len)


class Losses(list[Any]):
    """A list with an attribute."""

    count = 0


def test_attributes_of_a_list_class_arrive() -> None:
    def make() -> Losses:
        made = Losses([torch.zeros(1)])
        made.count = 10
        return made

    def write(index: int, x: Tensor, losses: Losses) -> None:
        losses.append(index)
        losses.count += 1

    both(write, make, lambda losses: (type(losses), losses[1:], losses.count))


# ---- dicts -----------------------------------------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", [dict, OrderedDict, functools.partial(defaultdict, list)])
@pytest.mark.parametrize("root", [True, False], ids=["root casts", "each layer casts"])
def test_what_a_layer_writes_into_a_dict_is_there_for_the_next(kind: Callable[..., Any], root: bool) -> None:
    def write(index: int, x: Tensor, shared: dict[str, Any]) -> None:
        if index == 0:
            shared["kv"] = 1
            shared["old"] = shared.pop("old")  # last now
        elif index == 1:
            shared["kv"] += 1
            del shared["other"]
        else:
            shared["seen"] = list(shared)

    def look(shared: dict[str, Any]) -> Any:
        return [(key, value) for key, value in shared.items() if key != "table"], list(shared), shared["table"].dtype

    both(write, lambda: kind({"table": torch.zeros(3), "old": 0, "other": 0}), look, root=root)


def test_a_replaced_tensor_arrives_as_the_layer_made_it() -> None:
    def write(index: int, x: Tensor, state: dict[str, Tensor]) -> None:
        state["sum"] = state["sum"].float() + 1

    both(write, lambda: {"sum": torch.zeros(2)}, lambda state: (state["sum"].tolist(), state["sum"].dtype))


def test_nested_containers_keep_their_identity_and_what_is_written_at_each_level() -> None:
    def write(index: int, x: Tensor, state: dict[str, Any]) -> None:
        state["inner"]["list"].append(index)
        state["inner"][index] = index
        state["pair"][0].append(index)
        state["again"] = state["inner"]

    def rank_fn(rank: int) -> None:
        items, pair = [torch.zeros(1)], [torch.zeros(1)]
        inner: dict[Any, Any] = {"list": items}
        state = {"inner": inner, "pair": (pair, torch.zeros(1)), "quiet": []}
        sharded(write)(torch.ones(2, 4), state)
        assert state["inner"] is inner
        assert state["again"] is inner
        assert inner["list"] is items
        assert state["pair"][0] is pair
        assert items[1:] == pair[1:] == [0, 1, 2]
        assert list(inner) == ["list", 0, 1, 2]

    run_ranks(1, rank_fn)


def test_one_list_given_twice_is_one_list_inside() -> None:
    def write(index: int, x: Tensor, first: list[Any], second: list[Any]) -> None:
        assert first is second
        first.append(1)
        second.append(2)

    def rank_fn(rank: int) -> None:
        aux: list[Any] = [torch.zeros(1)]
        sharded(write)(torch.ones(2, 4), aux, second=aux)
        assert aux[1:] == [1, 2] * 3

    run_ranks(1, rank_fn)


# ---- objects ---------------------------------------------------------------------------------------------------------


@dataclass
class State:
    table: Tensor
    tokens: int = 0
    seen: list[int] = field(default_factory=list)
    made: str = field(init=False, default="")


@dataclass(slots=True)
class Slots:
    table: Tensor
    tokens: int = 0


@dataclass(frozen=True)
class Frozen:
    table: Tensor

    @functools.cached_property
    def rows(self) -> int:
        return len(self.table)


@pytest.mark.sample(2)
@pytest.mark.parametrize("root", [True, False], ids=["root casts", "each layer casts"])
@pytest.mark.parametrize("kind", [State, Slots])
def test_a_counter_in_a_dataclass_counts(kind: Any, root: bool) -> None:
    def write(index: int, x: Tensor, state: Any) -> None:
        state.tokens += len(x)

    both(write, lambda: kind(torch.zeros(3)), lambda state: (state.tokens, state.table.dtype), root=root)


def test_attributes_beside_the_fields_of_a_dataclass_arrive() -> None:
    def write(index: int, x: Tensor, state: State) -> None:
        state.made += str(index)
        state.seen.append(index)
        state.later = index  # type: ignore[attr-defined]

    both(write, lambda: State(torch.zeros(3)), lambda state: (state.made, state.seen, state.later))


def test_a_frozen_dataclass_keeps_what_it_cached() -> None:
    both(lambda index, x, state: state.rows, lambda: Frozen(torch.zeros(3)), lambda state: vars(state)["rows"])


def test_an_output_of_transformers_gets_its_fields() -> None:
    pytest.importorskip("transformers")
    from transformers.modeling_outputs import BaseModelOutputWithPast

    def write(index: int, x: Tensor, out: Any) -> None:
        out.hidden_states = (*(out.hidden_states or ()), index)
        out["attentions"] = index

    def look(out: Any) -> Any:
        return out.hidden_states, out.attentions, list(out), out.last_hidden_state.dtype

    both(write, lambda: BaseModelOutputWithPast(last_hidden_state=torch.zeros(2)), look)


def test_a_named_tuple_carries_the_list_in_it() -> None:
    class Pair(NamedTuple):
        table: Tensor
        items: list[Any]

    def write(index: int, x: Tensor, pair: Pair) -> None:
        pair.items.append(index)

    both(write, lambda: Pair(torch.zeros(1), [torch.zeros(1)]), lambda pair: pair.items[1:])


# ---- when ------------------------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True], ids=["around the unit", "inside the unit"])
def test_recomputation_writes_nothing_twice(reentrant: bool, inside: bool) -> None:
    ran = []

    def write(index: int, x: Tensor, aux: list[Any]) -> None:
        ran.append(index)
        aux.append(index)

    def rank_fn(rank: int) -> None:
        layer: Any = seeded(lambda: Layer(0, write))
        if inside:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=reentrant)
        layer = fully_shard(layer, mp_policy=POLICY)
        model: Any = layer if inside else functools.partial(checkpoint, layer, use_reentrant=reentrant)
        aux: list[Any] = [torch.zeros(1)]
        model(torch.ones(2, 4, requires_grad=True), aux).sum().backward()
        assert aux[1:] == [0]

    run_ranks(1, rank_fn)
    assert len(ran) == 2


def test_what_was_written_before_an_exception_is_there_as_without_units() -> None:
    def write(index: int, x: Tensor, aux: list[Any]) -> None:
        aux.append(index)
        if index == 1:
            raise KeyError("expected")

    def rank_fn(rank: int) -> None:
        aux: list[Any] = [torch.zeros(1)]
        model = sharded(write)
        with pytest.raises(KeyError, match="expected"):
            model(torch.ones(2, 4), aux)
        assert aux[1:] == [0, 1]

    run_ranks(1, rank_fn)


def test_a_registered_method_writes_as_a_forward_does() -> None:
    from fullshard import register_fsdp_forward_method

    class Encoder(Layer):
        def encode(self, x: Tensor, aux: list[Any]) -> Tensor:
            return self.forward(x, aux)

    def rank_fn(rank: int) -> None:
        model = fully_shard(Encoder(0, lambda index, x, aux: aux.append(index)), mp_policy=POLICY)
        register_fsdp_forward_method(model, "encode")
        aux: list[Any] = [torch.zeros(1)]
        model.encode(torch.ones(2, 4), aux)  # type: ignore[attr-defined, operator]
        assert aux[1:] == [0]

    run_ranks(1, rank_fn)


def test_a_compiled_layer_writes_as_an_eager_one() -> None:
    class Appends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, aux: list[Tensor]) -> Tensor:
            x = self.linear(x)
            aux.append(x.float().mean())
            return x

    def rank_fn(rank: int) -> None:
        model = Appends()
        model.compile(backend="eager")
        fully_shard(model, mp_policy=POLICY)
        aux = [torch.zeros(1)]
        model(torch.ones(2, 4), aux)
        assert len(aux) == 2

    run_ranks(1, rank_fn)


def _by_position(module: nn.Module, args: Any, output: Any) -> None:
    args[1].append("hook")


def _by_name(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    kwargs["aux"].append("hook")


@pytest.mark.sample(2)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("place", ["root", "layers"])
def test_hooks_of_the_program_write_as_the_forward_does(place: str, when: str) -> None:
    """Whether they were registered before the units were made or afterwards."""

    def hooked(model: Any) -> None:
        for module in [model] if place == "root" else model.layers:
            module.register_forward_pre_hook(lambda module, args: args[1].append("before"))
            module.register_forward_hook(_by_position)

    def rank_fn(rank: int) -> None:
        found: list[list[Any]] = []
        for shards in (False, True):
            model: Any = seeded(lambda: Model(lambda index, x, aux: aux.append(index)))
            if when == "before" or not shards:
                hooked(model)
            if shards:
                for layer in model.layers:
                    fully_shard(layer, mp_policy=POLICY)
                fully_shard(model, mp_policy=POLICY if place == "root" else MixedPrecisionPolicy())
                if when == "after":
                    hooked(model)
            for _ in range(2):
                found.append([torch.zeros(1)])
                model(torch.ones(2, 4), found[-1])
        assert found[0][1:] == found[1][1:] == found[2][1:] == found[3][1:] != []

    run_ranks(1, rank_fn)


def test_a_hook_writes_into_a_container_by_name_also_when_the_forward_raises() -> None:
    def write(index: int, x: Tensor, argument: Any, aux: list[Any]) -> None:
        aux.append(index)
        if len(aux) > 5:
            raise KeyError("expected")

    def rank_fn(rank: int) -> None:
        model = sharded(write)
        model.register_forward_hook(_by_name, with_kwargs=True, always_call=True)
        aux: list[Any] = [torch.zeros(1)]
        model(torch.ones(2, 4), aux=aux)
        assert aux[1:] == [0, 1, 2, "hook"]
        with pytest.raises(KeyError):
            model(torch.ones(2, 4), aux=aux)
        assert aux[5:] == [0, "hook"]

    run_ranks(1, rank_fn)


# ---- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "place"),
    [
        (lambda tensor: [1, tensor], r"argument\[1\]"),
        (lambda tensor: {"table": tensor}, r"argument\['table'\]"),
        (lambda tensor: State(tensor), r"argument\.table"),
        (lambda tensor: {"a": ([tensor], 1)}, r"argument\['a'\]\[0\]\[0\]"),
    ],
    ids=["list", "dict", "dataclass", "nested"],
)
def test_a_tensor_edited_in_place_in_a_copy_is_an_error_that_names_it(
    make: Callable[[Tensor], Any], place: str
) -> None:
    def find(value: Any) -> Tensor:
        if isinstance(value, Tensor):
            return value
        if isinstance(value, State):
            return value.table
        return find(
            list(value.values())[0] if isinstance(value, dict) else value[1 if len(value) > 1 and value[0] == 1 else 0]
        )

    def rank_fn(rank: int) -> None:
        model = sharded(lambda index, x, argument: find(argument).add_(1))
        with pytest.raises(RuntimeError, match=f"(?s){place}.*bfloat16.*cast_forward_inputs=False"):
            model(torch.ones(2, 4), make(torch.zeros(3)))

    run_ranks(1, rank_fn)


def _cache(index: int, x: Tensor, cache: Any) -> None:
    """Keys of a position in memory that was made before."""
    cache["keys"][index].copy_(x[0])


@pytest.mark.parametrize(
    "context", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)]
)
def test_a_cache_that_a_generation_writes_into_is_an_error_in_any_mode(context: Any) -> None:
    """With keys in the compute dtype it is written."""

    def rank_fn(rank: int) -> None:
        model, adding = sharded(_cache).eval(), sharded(lambda index, x, keys: keys.add_(1)).eval()
        x = torch.ones(2, 4)
        with context():
            cache = {"keys": torch.zeros(3, 4)}
            if context is torch.inference_mode:
                with pytest.raises(RuntimeError, match=r"(?s)argument\['keys'\].*assign a new tensor"):
                    model(x, cache)
                with pytest.warns(UserWarning, match=r"(?s)the tensor argument .*edited in place"):
                    adding(x, cache["keys"])
            with torch.no_grad():
                half = {"keys": torch.zeros(3, 4, dtype=torch.bfloat16), "mask": torch.zeros(1)}
                model(x, half)
                assert half["keys"].any(1).all()
        with pytest.raises(RuntimeError, match=r"(?s)argument\['keys'\].*assign a new tensor"), torch.no_grad():
            model(x, {"keys": torch.zeros(3, 4)})

    run_ranks(1, rank_fn)


def test_a_tensor_of_the_compute_dtype_is_edited_in_place_for_the_caller() -> None:
    both(
        lambda index, x, state: state["count"].add_(1) and state["half"].add_(1),
        lambda: {
            "count": torch.zeros(1, dtype=torch.long),
            "half": torch.zeros(1, dtype=torch.bfloat16),
            "t": torch.zeros(1),
        },
        lambda state: (state["count"].item(), state["half"].item()),
    )


def test_a_plain_tensor_argument_edited_in_place_is_a_warning() -> None:
    def rank_fn(rank: int) -> None:
        model = sharded(lambda index, x, argument: argument.add_(1) if index == 0 else None)
        total = torch.zeros(3)
        with pytest.warns(UserWarning, match=r"(?s)argument.*edited in place.*cast_forward_inputs=False"):
            model(torch.ones(2, 4), total)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(torch.ones(2, 4), total)  # once

    run_ranks(1, rank_fn)


def test_the_callers_list_changed_beside_its_copy_is_an_error() -> None:
    outside: list[Any] = [torch.zeros(1)]

    def write(index: int, x: Tensor, aux: list[Any]) -> None:
        aux.append(1)
        outside.append(2)

    def rank_fn(rank: int) -> None:
        with pytest.raises(RuntimeError, match=r"(?s)argument.*changed.*cast_forward_inputs=False"):
            sharded(write)(torch.ones(2, 4), outside)

    run_ranks(1, rank_fn)


def test_a_dict_class_with_rules_of_its_own_gets_what_its_copy_has() -> None:
    class Fixed(dict[str, Any]):
        closed = False

        def __setitem__(self, key: str, value: Any) -> None:
            if self.closed and key not in self:
                raise TypeError("closed")
            super().__setitem__(key, value)

    def make() -> Fixed:
        given = Fixed(table=torch.zeros(1))
        given.closed = True
        return given

    def write(index: int, x: Tensor, given: Fixed) -> None:
        given.setdefault("new", index)
        with pytest.raises(TypeError, match="closed"):
            given["other"] = index

    both(write, make, lambda given: (given["new"], given.closed, list(given)))


def test_what_is_not_copied_is_handed_over_itself() -> None:
    held: list[Any] = [1, torch.zeros(1, dtype=torch.bfloat16)]
    made = copy.copy(held)

    def write(index: int, x: Tensor, argument: list[Any]) -> None:
        assert argument is held

    run_ranks(1, lambda rank: sharded(write)(torch.ones(2, 4), held))
    assert all(map(lambda a, b: a is b, held, made))
