"""`transfer`: tensors from one layout to another one, over any two sets of ranks of one world, without a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._torch import settled
from ..agree import mark_restored
from ..api import allocate, forget_values, write_shards
from ..comm import Exchange, OwnParts, Ranks, problems_of, ranks_of, texts_of
from ..layout import Box, Held, Link, Names, TransferPlan, itemsize, rename
from ..layout.routes import ALIGNMENT
from ..param import Layouts, Place, as_text, dtype_named, from_text, held_by, local_data, places_of, poison
from ..policy.arguments import expect, expect_group, expect_optimizers, expect_whole
from .transfer_state import Filled, State, described, planned, shown
from .weights import named_state, overflows

Side = nn.Module | Mapping[str, Any] | tuple[nn.Module, Any] | None
LIMIT_NBYTES = 256 << 20
_HOST = torch.device("cpu")


class TransferError(RuntimeError):
    """A transfer that all ranks refused before anything was written. `problems`: each with its rank."""

    def __init__(self, message: str, problems: list[str]) -> None:
        super().__init__(message)
        self.problems = problems

    def __reduce__(self) -> tuple[Any, ...]:
        return TransferError, (*self.args, self.problems)


def transfer(
    source: Side,
    target: Side,
    *,
    names: Names = None,
    dtype: torch.dtype | None = None,
    limit_nbytes: int = LIMIT_NBYTES,
    process_group: dist.ProcessGroup | None = None,
) -> Transfer:
    """Prepare to move the tensors of `source` into those of `target`, whatever the layouts of both are.

        move = fullshard.transfer(policy, engine_model, names={"*": "model.*"})
        print(move.plan())
        move.run()  # after each update of the policy

    Every rank of `process_group` (default: all) calls this, and `run`, in the same order and outside of a step. A rank
    that holds no part of one side passes None for it.
    source, target: a module (its parameters and persistent buffers); `(module, optimizer)` on both sides, for the
        optimizer's state and settings too; or a mapping of names to tensors, nested as state dicts are. Tensors are
        plain or DTensors: sharded, replicated, on several axes, on any meshes of these ranks. A plain tensor is whole
        on each rank that passes it, and the same on all of them. What the source has, the target must have, and the
        other way round. An optimizer of the target needs no state yet, and has the source's alone afterwards; counts
        and settings that are no tensors are those of this call, and a run after they changed is refused. State of
        another shape than its parameter's goes whole to the rank that owns the matrix (`step_on_owners`), or else to
        each rank that has the parameter: plain, or replicated where it is a DTensor in the source.
    names: from names of the source to those of the target: see `weights`.
    dtype: in which floating-point values travel; None: the narrower one of both ends. Values arrive in the target's
        dtype. The state of an optimizer keeps its own.
    limit_nbytes: of a message, rounded down to 16. A rank holds one message at a time besides its tensors. Two ranks
        exchange their bytes in as many messages as the limit asks for.

    This call sends descriptions alone. Raises `ValueError` on all ranks for names, shapes or kinds of dtypes that do
    not fit. The result keeps both sides; layouts must not change between runs, values may.
    """
    for argument, side in (("source", source), ("target", target)):
        fits = side is None or isinstance(side, (nn.Module, Mapping))
        if isinstance(side, tuple):
            fits = len(side) == 2 and isinstance(side[0], nn.Module)
            expect_optimizers(argument, side[1] if fits else side)
        wanted = "a module, (module, optimizer), a mapping of names to tensors, or None"
        expect(argument, fits, wanted, side, "pass model or its state dict")
    fits = dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)
    expect("dtype", fits, "a floating-point dtype or None", dtype, "pass torch.bfloat16, for example")
    rules = names is None or callable(names) or isinstance(names, Mapping)
    expect("names", rules, "a mapping, a function or None", names, "see docs/how-to/hand-over.md")
    expect_whole("limit_nbytes", limit_nbytes, ALIGNMENT)
    expect_group("process_group", process_group)
    return Transfer(source, target, names, dtype, limit_nbytes // ALIGNMENT * ALIGNMENT, process_group)


class Transfer:
    """The result of `transfer`: `plan()` describes it, `run()` moves the values there are now, any number of times."""

    def __init__(
        self,
        source: Side,
        target: Side,
        names: Names,
        dtype: torch.dtype | None,
        limit_nbytes: int,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        self._source, self._target = source, target
        ranks = ranks_of(process_group, _HOST)
        # The part of the optimizers that is not in the plan; and that of the source here, as the plan knows it.
        self._state = State([], {}, {}, {}, [], {})
        with ranks.texts.together("transfer: descriptions"):
            self._plan, self._state, problems, device = _planned((source, target), names, dtype, limit_nbytes, ranks)
            # A mapping of names may differ between ranks, so each reports what it found.
            found = problems_of(ranks.texts, problems)
        if found:
            texts = list(dict.fromkeys(one.partition(": ")[2] for one in found)) if _is_alike(found, ranks) else found
            texts = [shown(text) for text in texts]
            raise ValueError(f"transfer: expected a source that fits the target, found {'; '.join(texts[:12])}")
        self._ranks = ranks_of(process_group, torch.device(device))
        self._known = described(source).text()

    def plan(self) -> TransferPlan:
        """The plan of what travels: `print` it, or ask it for the `routes()` and what one rank `sends(rank)` and
        `receives(rank)`. No message."""
        return self._plan

    def run(self) -> None:
        """Move the values. Collective; complete on return.

        Before anything is written all ranks look at their values and their memory: a finite value that would become
        inf, a target without memory and no room for it, or for a message, is a `TransferError` on all ranks, and the
        target is unchanged. If a rank fails or ends later, all others raise `PeerFailed` with its name, and the target
        is lost on all its ranks: its floating-point values are NaN, and a forward of a model that `fully_shard` was
        applied to refuses them until they are written anew.
        """
        texts = self._ranks.texts
        with texts.together("transfer: values and memory"):
            exchange, buffer, filled, problems = self._prepared()
            found = problems_of(texts, problems)
            (most,) = texts.largest([0 if exchange is None else exchange.most_messages])
        if found or exchange is None or buffer is None or filled is None:
            found = [shown(text) for text in found]
            raise TransferError(
                f"transfer: expected values and memory that allow it, found {'; '.join(found[:8])}; the target is "
                f"unchanged",
                found,
            )
        try:
            with texts.together("transfer"):
                exchange.run(buffer, most)
                # Whoever is through here knows that all are.
                texts.largest([0])
        except BaseException as error:
            lost = self._lose(filled)
            error.add_note(
                f"transfer: {lost} tensor(s) of the target on this rank are lost: load or transfer them again"
            )
            raise
        filled.commit()
        with suppress(ValueError):  # nothing is sharded by fully_shard
            mark_restored(list(tensors_of(self._target).values()))

    def _prepared(self) -> tuple[Exchange | None, Tensor | None, Filled | None, list[str]]:
        problems = []
        try:
            if (model := _model_of(self._target)) is not None:
                units = write_shards(model, "transfer")
                if units and any(local_data(tensor).is_meta for tensor in model.state_dict(keep_vars=True).values()):
                    allocate(model)
            filled = Filled(self._target, self._state, self._ranks.rank)
            state = described(self._source)
            if state.text() != self._known:
                raise RuntimeError("the optimizer's state or settings changed since; make the transfer anew")
            source = tensors_of(self._source) | state.tensors
            target = tensors_of(self._target) | filled.tensors
            problems += [f"{name}: no memory" for name, tensor in source.items() if _is_missing(tensor)]
            problems += [f"{name}: no memory" for name, tensor in target.items() if _is_missing(tensor)]
            problems += self._overflows(source)
            exchange = Exchange(
                self._plan,
                self._ranks,
                _side(source, self._plan.sources, self._ranks.rank),
                _side(target, self._plan.targets, self._ranks.rank),
            )
            buffer = exchange.buffer()
        except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
            return None, None, None, [*problems, f"{type(error).__name__}: {error}"]
        return exchange, buffer, filled, problems

    def _overflows(self, source: Mapping[str, Tensor]) -> list[str]:
        found = []
        for link in self._plan.links:
            if self._plan.sources[link.source].parts.box(self._ranks.rank) is None:
                continue
            kinds = dict.fromkeys((self._plan.wire_dtype(link), self._plan.targets[link.target].dtype))
            for kind in kinds:
                if overflows(local_data(source[link.source]), dtype_named(kind)):
                    found.append(f"{link.source}: finite values that are none in {kind}")
                    break
        return found

    def _lose(self, filled: Filled) -> int:
        target = tensors_of(self._target)
        for tensor in filled.tensors.values():
            poison(tensor)
        if (model := _model_of(self._target)) is not None:
            forget_values(model, target.values())
        else:
            for tensor in target.values():
                poison(tensor)
        return len(target) + len(filled.tensors)


def _model_of(side: Side) -> nn.Module | None:
    side = side[0] if isinstance(side, tuple) else side
    return side if isinstance(side, nn.Module) else None


def tensors_of(side: Side, prefix: str = "") -> dict[str, Tensor]:
    """The tensors of one side by name; of nested mappings by the names with dots between them."""
    if side is None:
        return {}
    model = _model_of(side)
    if model is not None:
        return named_state(model)
    assert isinstance(side, Mapping)
    found: dict[str, Tensor] = {}
    for name, value in side.items():
        if isinstance(value, Tensor):
            found[f"{prefix}{name}"] = settled(value)
        elif isinstance(value, Mapping):
            found.update(tensors_of(value, f"{prefix}{name}."))
    return found


def _is_missing(tensor: Tensor) -> bool:
    local = local_data(tensor)
    return local.is_meta and local.numel() > 0


def _side(tensors: Mapping[str, Tensor], held: Mapping[str, Held], rank: int) -> OwnParts:
    """This rank's parts."""

    def box(name: str) -> Box | None:
        return held[name].parts.box(rank)

    return OwnParts({name: local_data(tensor).detach() for name, tensor in tensors.items()}, box)


# ---- the plan --------------------------------------------------------------------------------------------------------


def _planned(
    both: tuple[Side, Side],
    names: Names,
    dtype: torch.dtype | None,
    limit_nbytes: int,
    ranks: Ranks,
) -> tuple[TransferPlan, State, list[str], str]:
    """The plan, what does not fit, and the device of the messages. Collective: it shares what each rank holds."""
    here = tensors_of(both[0]), tensors_of(both[1])
    (source, wrong), (target, wrong_too) = places_of(here[0]), places_of(here[1])
    problems, state, texts = [*wrong, *wrong_too], dict[str, Place](), [_NOTHING, _NOTHING]
    kind = None if dtype is None else str(dtype).removeprefix("torch.")
    try:
        states = described(both[0]), described(both[1])
        state, wrong_state = places_of(states[0].tensors)
        problems += wrong_state
        texts = [states[0].text(), states[1].text()]
    except TypeError as error:
        problems.append(f"an optimizer's settings or state: {error}")
    mine = json.dumps([as_text(source), as_text(target), as_text(state), *texts, _device_of(here), limit_nbytes, kind])
    given = [
        (json.loads(text), [ranks.members[number] for number in numbers] if ranks.texts.world > 1 else [ranks.rank])
        for text, numbers in texts_of(ranks.texts, mine)
    ]
    if len({(limit, travels) for (*_, limit, travels), _ in given}) > 1:
        problems.append("limit_nbytes or dtype: other values on other ranks")
    devices = sorted({device for (*_, device, _, _), _ in given if device})
    device = next((one for one in devices if one != "cpu"), "cpu")
    layouts = Layouts()
    sides = list[dict[str, Held]]()
    for side in range(3):
        held = held_by([(from_text(told[side]), where) for told, where in given], layouts)
        if isinstance(held, list):
            problems += held
        sides.append({} if isinstance(held, list) else held)
    sources, targets, held_state = sides
    links: list[Link] = []
    moved = State([], {}, {}, {}, [], {})
    if not problems:
        links, problems = _linked(names, sources, targets)
    if not problems:
        optimizers = [json.loads(told[3]) for told, _ in given], [(json.loads(told[4]), where) for told, where in given]
        moved = planned(names, sources, targets, held_state, optimizers)
        problems = moved.problems
    links, sources, targets = [*links, *moved.links], sources | held_state, targets | moved.targets
    exact = frozenset(held_state)
    return TransferPlan(links, sources, targets, ranks.members, limit_nbytes, kind, exact), moved, problems, device


_NOTHING = json.dumps([{}, [], [], {}, {}])


def _linked(names: Names, sources: Mapping[str, Held], targets: Mapping[str, Held]) -> tuple[list[Link], list[str]]:
    """The links of a transfer, each memory of the target once; and what does not fit."""
    shapes = {name: held.shape for name, held in targets.items()}
    found = rename(names, {name: held.shape for name, held in sources.items()}, shapes)
    problems = list(found.problems)
    for name, shape in found.shapes.items():
        if name not in targets:
            problems.append(f"{name}: not in the target")
        elif targets[name].shape != shape:
            problems.append(f"{name}: {shape} from the source, {targets[name].shape} in the target")
    covered = {targets[name].same_as for name in found.shapes if name in targets}
    problems += [f"{name}: not in the source" for name, held in targets.items() if held.same_as not in covered]
    # By the memory that it writes: the names of the target, and what each is made of.
    writers: dict[str, dict[str, list[Link]]] = {}
    for link in found.links:
        if link.target in targets:
            writers.setdefault(targets[link.target].same_as, {}).setdefault(link.target, []).append(link)
    links = []
    for same_as, by_name in writers.items():
        made = {tuple((sources[one.source].same_as, *one[2:]) for one in those) for those in by_name.values()}
        if len(made) > 1:
            problems.append(f"{' = '.join(by_name)}: one tensor in the target, several in the source; leave out others")
        links += by_name.get(same_as) or next(iter(by_name.values()))
    for link in links:
        one, other = sources[link.source].dtype, targets[link.target].dtype
        if one != other and (_kind(one) != _kind(other) or (_kind(one) == "int" and itemsize(other) < itemsize(one))):
            problems.append(f"{link.target}: {one} in the source, {other} in the target, which cannot hold its values")
    return links, problems


def _kind(dtype: str) -> str:
    found = dtype_named(dtype)
    return (
        "float" if found.is_floating_point else "complex" if found.is_complex else "bool" if dtype == "bool" else "int"
    )


def _device_of(here: tuple[dict[str, Tensor], dict[str, Tensor]]) -> str:
    """Where messages of this rank would be: on the accelerator if any of its tensors is there; "" without tensors."""
    kinds = {local_data(tensor).device.type for side in here for tensor in side.values()} - {"meta"}
    return next((kind for kind in sorted(kinds) if kind != "cpu"), "cpu") if kinds else ""


def _is_alike(found: list[str], ranks: Ranks) -> bool:
    """Whether all ranks have the same problems."""
    by_rank: dict[str, list[str]] = {}
    for one in found:
        rank, _, text = one.partition(": ")
        by_rank.setdefault(rank, []).append(text)
    return len(by_rank) == ranks.texts.world and len({tuple(texts) for texts in by_rank.values()}) == 1
