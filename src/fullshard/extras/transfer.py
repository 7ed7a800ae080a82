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
from ..api import allocate, forget_values, mark_restored
from ..comm import Exchange, Parts, Ranks, problems_of, ranks_of, settle_uploads, texts_of
from ..engine.root import module_units
from ..layout import Box, Held, Link, Names, TransferPlan, itemsize, rename
from ..layout.routes import ALIGNMENT
from ..param import Layouts, as_text, dtype_named, from_text, held_by, local_data, places_of, poison
from ..policy.arguments import expect, expect_group, expect_whole
from .weights import named_state, overflows

Side = nn.Module | Mapping[str, Any] | None
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
    source, target: a module (its parameters and persistent buffers), or a mapping of names to tensors, nested as state
        dicts are. Tensors are plain or DTensors: sharded, replicated, on several axes, on any meshes of these ranks. A
        plain tensor is whole on each rank that passes it, and the same on all of them. What the source has, the target
        must have, and the other way round.
    names: from names of the source to those of the target: see `weights`.
    dtype: in which floating-point values travel; None: the narrower one of both ends. Values arrive in the target's
        dtype.
    limit_nbytes: of a message, rounded down to 16. A rank holds one message at a time besides its tensors. Two ranks
        exchange their bytes in as many messages as the limit asks for.

    This call sends descriptions alone. Raises `ValueError` on all ranks for names, shapes or kinds of dtypes that do
    not fit. The result keeps both sides; layouts must not change between runs, values may.
    """
    for argument, side in (("source", source), ("target", target)):
        fits = side is None or isinstance(side, (nn.Module, Mapping))
        expect(argument, fits, "a module, a mapping of names to tensors, or None", side, "pass model or its state dict")
    fits = dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)
    expect("dtype", fits, "a floating-point dtype or None", dtype, "pass torch.bfloat16, for example")
    rules = names is None or callable(names) or isinstance(names, Mapping)
    expect("names", rules, "a mapping, a function or None", names, "see docs/how-to/hand-over.md")
    expect_whole("limit_nbytes", limit_nbytes, ALIGNMENT)
    expect_group("process_group", process_group)
    return Transfer(source, target, names, dtype, limit_nbytes // ALIGNMENT * ALIGNMENT, process_group)


class Transfer:
    """What `transfer` returns: `plan()` describes it, `run()` moves the values there are now, any number of times."""

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
        here = tensors_of(source), tensors_of(target)
        with ranks.texts.together("transfer: descriptions"):
            self._plan, problems, device = _planned(here, names, dtype, limit_nbytes, ranks)
            # A mapping of names may differ between ranks, so each reports what it found.
            found = problems_of(ranks.texts, problems)
        if found:
            shown = list(dict.fromkeys(one.partition(": ")[2] for one in found)) if _is_alike(found, ranks) else found
            raise ValueError(f"transfer: expected a source that fits the target, found {'; '.join(shown[:12])}")
        self._ranks = ranks_of(process_group, torch.device(device))

    def plan(self) -> TransferPlan:
        """What travels: `print` it, or ask it for the `routes()` and what one rank `sends(rank)` and `receives(rank)`.
        No message."""
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
            exchange, buffer, problems = self._prepared()
            found = problems_of(texts, problems)
            (most,) = texts.largest([0 if exchange is None else exchange.most_messages])
        if found or exchange is None or buffer is None:
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
            lost = self._lose()
            error.add_note(
                f"transfer: {lost} tensor(s) of the target on this rank are lost: load or transfer them again"
            )
            raise
        with suppress(ValueError):  # nothing is sharded by fully_shard
            mark_restored(list(tensors_of(self._target).values()))

    def _prepared(self) -> tuple[Exchange | None, Tensor | None, list[str]]:
        problems = []
        try:
            if isinstance(self._target, nn.Module):
                _settle(self._target)
            source, target = tensors_of(self._source), tensors_of(self._target)
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
            return None, None, [*problems, f"{type(error).__name__}: {error}"]
        return exchange, buffer, problems

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

    def _lose(self) -> int:
        target = tensors_of(self._target)
        if isinstance(self._target, nn.Module):
            forget_values(self._target, target.values())
        else:
            for tensor in target.values():
                poison(tensor)
        return len(target)


def tensors_of(side: Side, prefix: str = "") -> dict[str, Tensor]:
    """The tensors of one side by name; of nested mappings by the names with dots between them."""
    if side is None:
        return {}
    if isinstance(side, nn.Module):
        return named_state(side)
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


def _settle(model: nn.Module) -> None:
    """The shards of `model` may be written."""
    units = module_units(model)
    for unit in units:
        if unit.opened is not None:
            raise RuntimeError(
                f"transfer: expected a target outside of full_params, found {unit.record.name} open; leave that context"
            )
        if unit.root is not None:
            unit.root.reshard(unit)
    settle_uploads()
    if units and any(local_data(tensor).is_meta for tensor in model.state_dict(keep_vars=True).values()):
        allocate(model)


def _side(tensors: Mapping[str, Tensor], held: Mapping[str, Held], rank: int) -> Parts:
    """This rank's parts."""

    def box(name: str) -> Box | None:
        return held[name].parts.box(rank)

    return Parts({name: local_data(tensor).detach() for name, tensor in tensors.items()}, box)


# ---- the plan --------------------------------------------------------------------------------------------------------


def _planned(
    here: tuple[dict[str, Tensor], dict[str, Tensor]],
    names: Names,
    dtype: torch.dtype | None,
    limit_nbytes: int,
    ranks: Ranks,
) -> tuple[TransferPlan, list[str], str]:
    """The plan, what does not fit, and the device of the messages. Collective: it shares what each rank holds."""
    (source, wrong), (target, wrong_too) = places_of(here[0]), places_of(here[1])
    problems = wrong + wrong_too
    kind = None if dtype is None else str(dtype).removeprefix("torch.")
    mine = json.dumps([as_text(source), as_text(target), _device_of(here), limit_nbytes, kind])
    given = [
        (json.loads(text), [ranks.members[number] for number in numbers] if ranks.texts.world > 1 else [ranks.rank])
        for text, numbers in texts_of(ranks.texts, mine)
    ]
    if len({(limit, travels) for (_, _, _, limit, travels), _ in given}) > 1:
        problems.append("limit_nbytes or dtype: other values on other ranks")
    devices = sorted({device for (_, _, device, _, _), _ in given if device})
    device = next((one for one in devices if one != "cpu"), "cpu")
    layouts = Layouts()
    sides = list[dict[str, Held]]()
    for side in range(2):
        held = held_by([(from_text(texts[side]), where) for texts, where in given], layouts)
        if isinstance(held, list):
            problems += held
        sides.append({} if isinstance(held, list) else held)
    sources, targets = sides
    links: list[Link] = []
    if not problems:
        links, problems = _linked(names, sources, targets)
    return TransferPlan(links, sources, targets, ranks.members, limit_nbytes, kind), problems, device


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
