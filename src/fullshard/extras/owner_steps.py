"""One step of whole matrices on their owners: what is sent there, stepped, and sent back, chunk after chunk.

    there[i + 1]    is sent while chunk i is stepped
    back[i]         is sent while chunk i + 1 is stepped; then all ranks write their parts of chunk i, or none does

The owner steps copies. A chunk in which an owner raised is written nowhere, and what comes after it is dropped.
"""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .._torch import dtensor_like, local_of, version_of
from ..api.optimizer import local_gradient, step_as_its_class
from ..comm import OwnerLine
from ..layout import Box, FleetPlan, align_up
from ..param import dtype_named

# In the head of a segment.
_ABSENT, _PRESENT = 0, 1
_STEPPED, _RAISED, _CHANGED = 0, 1, 2
_ALIGNMENT = 16


class Whole(NamedTuple):
    """One matrix of a plan as this rank knows it. `boxes`: the part of each rank, in coordinates of the matrix.
    `group`: the position of its group of the optimizer; `state`: keys and dtypes of its state that has its shape."""

    parameter: DTensor
    number: int | None
    title: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    group: int
    gradient: torch.dtype
    state: tuple[tuple[str, torch.dtype], ...]

    def piece(self, tensor: Tensor, first_row: int) -> Tensor:
        """This rank's part of the matrix, in a local tensor of the parameter's layout that begins at `first_row`."""
        if self.number is None:
            return tensor
        return (
            tensor[self.number - first_row] if 0 <= self.number - first_row < tensor.shape[0] else tensor[:0].flatten()
        )

    def kept_key(self, key: str) -> str:
        """The name of state that has not the shape of the matrix, in the parameter's state."""
        return key if self.number is None else f"{key}[{self.number}]"

    def kept(self, entries: Mapping[Any, Any]) -> dict[Any, Any]:
        """That state, by the name that the optimizer knows."""
        others = {key: value for key, value in entries.items() if not is_shaped(value, self.parameter)}
        if self.number is None:
            return others
        end = f"[{self.number}]"
        return {key.removesuffix(end): value for key, value in others.items() if str(key).endswith(end)}


def is_shaped(value: object, parameter: DTensor) -> bool:
    """Whether an entry of a parameter's state is placed like it."""
    return isinstance(value, DTensor) and value.shape == parameter.shape


class Fleet(NamedTuple):
    """The matrices whose parts are on the ranks of `line`. `first_rows`: of each, where this rank's part of a stack
    begins."""

    plan: FleetPlan
    line: OwnerLine
    wholes: tuple[Whole, ...]
    first_rows: tuple[int, ...]


class OwnerRaised(RuntimeError):
    """Raised on all ranks: an owner raised in its step. `by_rank`: its text; `written`: titles of the matrices that
    took the step."""

    def __init__(self, by_rank: Mapping[int, str], error: BaseException | None, written: Sequence[str]) -> None:
        super().__init__("; ".join(f"rank {rank}: {text}" for rank, text in by_rank.items()))
        self.by_rank, self.error, self.written = dict(by_rank), error, tuple(written)


# ---- settings of an optimizer ----------------------------------------------------------------------------------------


class Settings:
    """The values that a step changes beside parameters and their state: options of groups, and numbers on the
    optimizer. Each run of a part of the matrices begins with those of before the step, and all runs leave the same."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = [{k: copied(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        self._numbers = {k: v for k, v in vars(optimizer).items() if isinstance(v, (bool, int, float, str))}
        self._ran = False

    def begin(self) -> None:
        """A part of the matrices is about to be stepped."""
        if self._ran:
            self.restore()
        self._ran = True

    def restore(self) -> None:
        """Put back what was there before the step."""
        for group, before in zip(self._optimizer.param_groups, self._groups, strict=True):
            for key in group.keys() - before.keys() - {"params"}:
                del group[key]
            for key, value in before.items():
                held = group.get(key)
                if isinstance(held, Tensor) and isinstance(value, Tensor):
                    if version_of(held) and not torch.equal(held, value):
                        held.copy_(value)
                else:
                    group[key] = copied(value)
        vars(self._optimizer).update(self._numbers)


def copied(value: Any) -> Any:
    """A value of an optimizer, so that a step on it leaves the original."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, (bool, int, float, complex, str, type(None))) or callable(value):
        return value
    if type(value) in (list, tuple):
        return type(value)(map(copied, value))
    if type(value) is dict:
        return {key: copied(item) for key, item in value.items()}
    return copy.deepcopy(value)


# ---- a step ----------------------------------------------------------------------------------------------------------


class _Sent(NamedTuple):
    """An all-to-all under way. `starts`: where the segment of each rank begins in `out`."""

    work: Any
    out: Tensor
    pieces: Tensor
    starts: list[int]

    def heads(self, lengths: Mapping[int, int]) -> dict[int, list[int]]:
        """The first bytes of some ranks' segments, on the host: of each as many as `lengths` says."""
        if not lengths:
            return {}
        found = torch.cat([self.out[self.starts[rank] : self.starts[rank] + n] for rank, n in lengths.items()]).tolist()
        heads, at = {}, 0
        for rank, n in lengths.items():
            heads[rank] = found[at : at + n]
            at += n
        return heads


class _Stepped:
    """A chunk that its owner stepped: the whole tensors to send back, by position in the plan; and what of them was not
    known before. `error`: what the step raised."""

    def __init__(self) -> None:
        self.back: dict[int, list[Tensor]] = {}
        self.state: dict[int, dict[Any, Any]] = {}
        self.changed = False
        self.error: BaseException | None = None


class FleetStep:
    """One step of the matrices of one fleet of `optimizer`, whose settings were `settings` before."""

    def __init__(self, fleet: Fleet, optimizer: Optimizer, settings: Settings) -> None:
        self._fleet, self._optimizer, self._settings = fleet, optimizer, settings
        self._me, self._world = fleet.line.rank, len(fleet.line.ranks)
        # Whether messages of the way back began, so that a rank may have written.
        self.may_have_written = False
        # The titles of the matrices that took the step, on all ranks.
        self.written: list[str] = []
        self._gradients: dict[int, Tensor | None] = {}
        # The matrices whose state has other tensors of their shape than before: by position, what their owner has.
        self._new: dict[int, dict[Any, Tensor]] = {}

    def run(self) -> bool:
        """Take the step. Returns whether the state of some matrix has other tensors of its shape than before. Raises
        `OwnerRaised` on all ranks if an owner raised. Collective over the fleet."""
        plan, changed = self._fleet.plan, False
        for parameter in {id(one.parameter): one.parameter for one in self._fleet.wholes}.values():
            self._gradients[id(parameter)] = local_gradient(parameter)
        arriving: _Sent | None = self._send_there(0)
        before: tuple[int, _Sent, _Stepped] | None = None
        for chunk in range(plan.chunks):
            following = self._send_there(chunk + 1) if chunk + 1 < plan.chunks else None
            stepped = self._step(chunk, self._arrived(arriving))
            sent = self._send_back(chunk, stepped)
            self.may_have_written = True
            if before is not None:
                changed |= self._finish(*before, [following, sent])
            before, arriving = (chunk, sent, stepped), following
        assert before is not None
        changed |= self._finish(*before, [])
        if changed:
            self._publish()
        return changed

    # ---- there ---------------------------------------------------------------------------------------------

    def _send_there(self, chunk: int) -> _Sent:
        plan = self._fleet.plan
        leaving = [plan.there(chunk, self._me, owner) for owner in range(self._world)]
        arriving = [plan.there(chunk, source, self._me).nbytes for source in range(self._world)]
        buffer = self._buffer(sum(segment.nbytes for segment in leaving))
        targets, sources, at = list[Tensor](), list[Tensor](), 0
        for segment in leaving:
            if segment.nbytes:
                flags = [_ABSENT if self._gradient(position) is None else _PRESENT for position in segment.matrices]
                buffer[at : at + len(flags)].copy_(torch.tensor(flags, dtype=torch.uint8))
                place = at + segment.head_nbytes
                for position in segment.matrices:
                    for piece, dtype in self._leaving(position):
                        numel = plan.matrices[position].parts[self._me]
                        if piece is not None and numel:
                            targets.append(_view(buffer, place, piece.shape, dtype))
                            sources.append(piece)
                        place += align_up(numel * dtype.itemsize, _ALIGNMENT)
            at += segment.nbytes
        _copy(targets, sources)
        return self._exchange(buffer, arriving, [segment.nbytes for segment in leaving])

    def _leaving(self, position: int) -> Iterator[tuple[Tensor | None, torch.dtype]]:
        """This rank's part of what travels of a matrix, each with its dtype; None for a gradient that is not there."""
        whole, first = self._fleet.wholes[position], self._fleet.first_rows[position]
        gradient = self._gradient(position)
        yield gradient, whole.gradient
        yield whole.piece(local_of(whole.parameter).detach(), first), whole.parameter.dtype
        entries = self._optimizer.state.get(whole.parameter, {})
        for key, dtype in whole.state:
            yield whole.piece(local_of(entries[key]).detach(), first), dtype

    def _gradient(self, position: int) -> Tensor | None:
        whole = self._fleet.wholes[position]
        gradient = self._gradients[id(whole.parameter)]
        if gradient is None:
            return None
        if gradient.dtype is not whole.gradient:
            raise RuntimeError(
                f"{type(self._optimizer).__name__}.step: expected a gradient of {whole.title} in {whole.gradient}, "
                f"found one in {gradient.dtype}; set grad_dtype of the parameter before the first step"
            )
        return whole.piece(gradient, self._fleet.first_rows[position])

    def _exchange(self, buffer: Tensor, arriving: list[int], leaving: list[int]) -> _Sent:
        out = self._buffer(sum(arriving))
        starts = [0, *accumulate(arriving)][:-1]
        work = self._fleet.line.exchange(out, buffer, arriving, leaving) if self._world > 1 else None
        return _Sent(work, out, buffer, starts)

    def _buffer(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._fleet.line.device)

    @staticmethod
    def _arrived(sent: _Sent | None) -> _Sent:
        assert sent is not None
        if sent.work is not None:
            sent.work.wait()
        return sent

    # ---- the step ------------------------------------------------------------------------------------------

    def _step(self, chunk: int, arrived: _Sent) -> _Stepped:
        """Step what this rank owns of `chunk`."""
        stepped, plan = _Stepped(), self._fleet.plan
        owned = plan.owned(chunk, self._me)
        try:
            present = self._present(owned, arrived)
            tensors = self._together(chunk, owned, arrived, present)
            if owned or chunk == 0:
                self._settings.begin()
                self._step_on(owned, present, tensors, stepped)
        except Exception as error:
            stepped.error = error
        return stepped

    def _present(self, owned: Sequence[int], arrived: _Sent) -> list[bool]:
        """Whether each matrix has a gradient, the same on all ranks."""
        own = [self._gradient(position) is not None for position in owned]
        others = [rank for rank in range(self._world) if rank != self._me]
        heads = arrived.heads(dict.fromkeys(others, len(owned)) if owned else {})
        for number, position in enumerate(owned):
            ranks = self._fleet.line.ranks
            without = [ranks[rank] for rank, head in heads.items() if head[number] == _ABSENT]
            without += [] if own[number] else [ranks[self._me]]
            if without and len(without) < self._world:
                raise RuntimeError(
                    f"expected a gradient of {self._fleet.wholes[position].title} on all ranks or on none, found None "
                    f"on rank {', '.join(map(str, sorted(without)))} alone; set .grad to None on all ranks"
                )
        return own

    def _together(
        self, chunk: int, owned: Sequence[int], arrived: _Sent, present: Sequence[bool]
    ) -> dict[int, list[Tensor]]:
        """The whole tensors of each matrix: gradient, parameter, state."""
        plan = self._fleet.plan
        targets, sources = list[Tensor](), list[Tensor]()
        wholes: dict[int, list[Tensor]] = {}
        for position, there in zip(owned, present, strict=True):
            whole = self._fleet.wholes[position]
            device = local_of(whole.parameter).device
            found = wholes[position] = []
            for number, (piece, dtype) in enumerate(self._leaving(position)):
                numel = 0 if number == 0 and not there else 1
                found.append(torch.empty(whole.shape if numel else (0,), dtype=dtype, device=device))
                if piece is not None and numel:
                    targets.append(_in(found[-1], whole.boxes[self._me]))
                    sources.append(piece)
        for source in range(self._world):
            segment = plan.there(chunk, source, self._me)
            place = arrived.starts[source] + segment.head_nbytes
            for position in segment.matrices if segment.nbytes else ():
                whole, numel = self._fleet.wholes[position], plan.matrices[position].parts[source]
                for tensor in wholes[position]:
                    if numel and tensor.numel():
                        box = whole.boxes[source]
                        targets.append(_in(tensor, box))
                        sources.append(_view(arrived.out, place, box.lengths, tensor.dtype))
                    place += align_up(numel * tensor.dtype.itemsize, _ALIGNMENT)
        _copy(targets, sources)
        return wholes

    def _step_on(
        self, owned: Sequence[int], present: Sequence[bool], tensors: dict[int, list[Tensor]], stepped: _Stepped
    ) -> None:
        optimizer, fleet = self._optimizer, self._fleet
        params: list[list[Tensor]] = [[] for _ in optimizer.param_groups]
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        proxies: dict[int, Tensor] = {}
        for position, there in zip(owned, present, strict=True):
            whole, (gradient, tensor, *shaped) = fleet.wholes[position], tensors[position]
            proxy: Tensor = nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
            proxies[position] = proxy
            proxy.grad = gradient if there else None
            entries = optimizer.state.get(whole.parameter, {})
            state[proxy] = {key: copied(value) for key, value in whole.kept(entries).items()}
            state[proxy].update(zip((key for key, _ in whole.state), shaped, strict=True))
            params[whole.group].append(proxy)
        step_with(optimizer, params, state)
        for position, whole in ((position, fleet.wholes[position]) for position in owned):
            proxy = proxies[position]
            proxy.grad = None
            entries = state[proxy]
            new = {key: value for key, value in entries.items() if _has_shape(value, whole.shape)}
            if proxy.shape != torch.Size(whole.shape):
                raise RuntimeError(
                    f"expected {whole.title} to keep its shape {whole.shape}, found {tuple(proxy.shape)}"
                )
            stepped.state[position] = {key: value for key, value in entries.items() if key not in new}
            if {key: value.dtype for key, value in new.items()} != dict(whole.state):
                stepped.changed = True
                self._new[position] = new
            known = [new[key] if key in new and new[key].dtype is dtype else proxy for key, dtype in whole.state]
            stepped.back[position] = [proxy.detach(), *known]

    # ---- back ----------------------------------------------------------------------------------------------

    def _send_back(self, chunk: int, stepped: _Stepped) -> _Sent:
        plan = self._fleet.plan
        leaving = [plan.back(chunk, self._me, target) for target in range(self._world)]
        arriving = [plan.back(chunk, owner, self._me).nbytes for owner in range(self._world)]
        buffer = self._buffer(sum(segment.nbytes for segment in leaving))
        said = _RAISED if stepped.error is not None else _CHANGED if stepped.changed else _STEPPED
        targets, sources, at = list[Tensor](), list[Tensor](), 0
        for target, segment in enumerate(leaving):
            if not segment.nbytes:
                continue
            buffer[at : at + 1].fill_(said)
            place = at + segment.head_nbytes
            for position in segment.matrices if stepped.error is None else ():
                whole, matrix = self._fleet.wholes[position], plan.matrices[position]
                for tensor, size in zip(stepped.back[position], matrix.back, strict=True):
                    numel = matrix.parts[target]
                    if numel and tensor.dtype.itemsize == size:
                        box = whole.boxes[target]
                        targets.append(_view(buffer, place, box.lengths, tensor.dtype))
                        sources.append(_in(tensor, box))
                    place += align_up(numel * size, _ALIGNMENT)
            at += segment.nbytes
        _copy(targets, sources)
        return self._exchange(buffer, arriving, [segment.nbytes for segment in leaving])

    def _finish(self, chunk: int, sent: _Sent, stepped: _Stepped, later: Sequence[_Sent | None]) -> bool:
        """Write this rank's parts of a chunk that came back, if all owners stepped it. Returns whether some owner has
        state of other shapes. `later`: messages under way, for which a rank waits before it raises."""
        self._arrived(sent)
        others = [rank for rank in range(self._world) if rank != self._me]
        said = {rank: head[0] for rank, head in sent.heads(dict.fromkeys(others, 1)).items()}
        said[self._me] = _RAISED if stepped.error is not None else _CHANGED if stepped.changed else _STEPPED
        if _RAISED in said.values():
            for one in later:
                if one is not None:
                    self._arrived(one)
            self._settings.restore()
            text = "" if stepped.error is None else f"{type(stepped.error).__name__}: {stepped.error}"
            told = {rank: text for rank, text in self._told(text).items() if text}
            raise OwnerRaised(told, stepped.error, self.written)
        self._write(chunk, sent, stepped)
        return _CHANGED in said.values()

    def _told(self, text: str) -> dict[int, str]:
        return self._fleet.line.told(text) if self._world > 1 else {self._fleet.line.ranks[0]: text}

    def _write(self, chunk: int, sent: _Sent, stepped: _Stepped) -> None:
        plan, optimizer = self._fleet.plan, self._optimizer
        targets, sources = list[Tensor](), list[Tensor]()
        for owner in range(self._world):
            segment = plan.back(chunk, owner, self._me)
            place = sent.starts[owner] + segment.head_nbytes
            for position in segment.matrices:
                whole, matrix = self._fleet.wholes[position], plan.matrices[position]
                self.written.append(whole.title)
                numel, present = matrix.parts[self._me], self._gradient(position) is not None
                if present:
                    optimizer.state[whole.parameter]  # noqa: B018  the same entries on all ranks
                pieces = list(self._leaving(position))[1:]
                for number, (piece, dtype) in enumerate(pieces):
                    assert piece is not None
                    if present:
                        if not numel:
                            found = torch.empty_like(piece)  # counts as a write, of which all ranks have as many
                        elif owner != self._me:
                            found = _view(sent.out, place, piece.shape, dtype)
                        else:
                            found = _in(stepped.back[position][number], whole.boxes[self._me])
                        targets.append(piece)
                        sources.append(found)
                    place += align_up(numel * dtype.itemsize, _ALIGNMENT)
        _copy(targets, sources)
        for position, state in stepped.state.items():
            self._keep(self._fleet.wholes[position], state)

    def _keep(self, whole: Whole, state: Mapping[Any, Any]) -> None:
        """State that has not the shape of the matrix: whole, on its owner."""
        if not state and whole.parameter not in self._optimizer.state:
            return
        entries = self._optimizer.state[whole.parameter]
        for key in whole.kept(entries).keys() - state.keys():
            del entries[whole.kept_key(key)]
        entries.update({whole.kept_key(key): value for key, value in state.items()})

    # ---- state that is new ---------------------------------------------------------------------------------

    def _publish(self) -> None:
        """Give all ranks their parts of state that was not there before, and take from them what is no more."""
        fleet, optimizer, plan = self._fleet, self._optimizer, self._fleet.plan
        mine = {
            position: [[key, str(value.dtype).removeprefix("torch.")] for key, value in new.items()]
            for position, new in self._new.items()
        }
        described: dict[int, dict[str, torch.dtype]] = {}
        for text in self._told(json.dumps(mine)).values():
            for position, entries in json.loads(text).items():
                described[int(position)] = {key: dtype_named(name) for key, name in entries}
        fresh: dict[int, list[tuple[str, torch.dtype]]] = {}
        for position, found in sorted(described.items()):
            whole = fleet.wholes[position]
            known = dict(whole.state)
            entries = optimizer.state[whole.parameter]
            for key in known.keys() - found.keys():
                if is_shaped(entries.get(key), whole.parameter):
                    del entries[key]
            fresh[position] = [(key, dtype) for key, dtype in found.items() if known.get(key) is not dtype]
            for key, dtype in fresh[position]:
                if not is_shaped(entries.get(key), whole.parameter) or entries[key].dtype is not dtype:
                    local = torch.zeros_like(local_of(whole.parameter), dtype=dtype, requires_grad=False)
                    entries[key] = dtensor_like(whole.parameter, local)

        def sizes(owner: int, target: int) -> int:
            return sum(
                align_up(plan.matrices[position].parts[target] * dtype.itemsize, _ALIGNMENT)
                for position, entries in fresh.items()
                if plan.owners[position] == owner != target
                for _, dtype in entries
            )

        leaving = [sizes(self._me, target) for target in range(self._world)]
        buffer, place = self._buffer(sum(leaving)), 0
        targets, sources = list[Tensor](), list[Tensor]()
        for target in range(self._world):
            for position, entries in fresh.items():
                if plan.owners[position] != self._me or target == self._me:
                    continue
                box, numel = fleet.wholes[position].boxes[target], plan.matrices[position].parts[target]
                for key, dtype in entries:
                    if numel:
                        targets.append(_view(buffer, place, box.lengths, dtype))
                        sources.append(_in(self._new[position][key], box))
                    place += align_up(numel * dtype.itemsize, _ALIGNMENT)
        _copy(targets, sources)
        sent = self._arrived(self._exchange(buffer, [sizes(owner, self._me) for owner in range(self._world)], leaving))
        targets, sources = [], []
        for position, entries in fresh.items():
            whole, owner = fleet.wholes[position], plan.owners[position]
            place, numel = sent.starts[owner], plan.matrices[position].parts[self._me]
            for key, dtype in entries:
                held = local_of(optimizer.state[whole.parameter][key])
                piece = whole.piece(held, fleet.first_rows[position])
                if numel:
                    targets.append(piece)
                    if owner == self._me:
                        sources.append(_in(self._new[position][key], whole.boxes[self._me]))
                    else:
                        sources.append(_view(sent.out, place, piece.shape, dtype))
                place += align_up(numel * dtype.itemsize, _ALIGNMENT)
            sent.starts[owner] = place
        _copy(targets, sources)
        self._new.clear()


def step_with(optimizer: Optimizer, params: Sequence[list[Tensor]], state: Any) -> None:
    """The step of the user's class on other parameters, by group, with their state."""
    groups, outer = [group["params"] for group in optimizer.param_groups], optimizer.state
    try:
        for group, own in zip(optimizer.param_groups, params, strict=True):
            group["params"] = own
        optimizer.state = state
        step_as_its_class(optimizer)
    finally:
        optimizer.state = outer
        for group, own in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = own


def _has_shape(value: object, shape: tuple[int, ...]) -> bool:
    return isinstance(value, Tensor) and tuple(value.shape) == shape and not value.is_sparse


def _in(whole: Tensor, box: Box) -> Tensor:
    for dim, (offset, length) in enumerate(zip(*box, strict=True)):
        whole = whole.narrow(dim, offset, length)
    return whole


def _view(buffer: Tensor, at: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    numel = 1
    for length in shape:
        numel *= length
    return buffer[at : at + numel * dtype.itemsize].view(dtype).view(tuple(shape))


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    with torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
