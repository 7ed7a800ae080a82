"""`weights`: the full tensors of a sharded model in buckets, for an inference engine or a file, under its names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._torch import cut_dim, settled
from ..comm import gathered, joining_groups, ranks_of, together_over
from ..comm.group import message_device
from ..engine.names import clean_name
from ..layout import Box, Link, Names, align_up, local_box, positions, rename, whole
from ..param import Place, dtype_named, local_data, places_of
from ..policy.arguments import expect, expect_module, expect_whole

BUCKET_NBYTES = 256 << 20


class WeightInfo(NamedTuple):
    """A tensor of `weights`, whole. The fields of vLLM's `ParamMeta`, in its order."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightPart(NamedTuple):
    """This rank's part of a tensor of `weights`: `tensor` begins at `offsets` of it, and may share the shard's
    memory."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor


Bucket = list[tuple[str, Tensor]]


def weights(
    model: nn.Module,
    *,
    names: Names = None,
    dtype: torch.dtype | None = None,
    bucket_nbytes: int = BUCKET_NBYTES,
) -> Weights:
    """The parameters and persistent buffers of `model` as full tensors, a bucket at a time.

        for bucket in fullshard.weights(model, names={"*": "model.*"}, dtype=torch.bfloat16):
            if rank == 0:
                engine.load_weights(bucket)  # a list of (name, tensor)

    Any model: sharded by `fully_shard`, torch's or this one, by tensor parallelism, or not at all; frozen and ignored
    parameters are included. No gradient, optimizer or extra state.
    names: None (those of the plain model); a function from a name to another one, or to None to leave a tensor out; or
        rules for renamed, fused, split, packed and unpacked tensors (docs/how-to/hand-over.md). Tied tensors come under
        each of their names, with one memory; leave one out with `{name: None}`.
    dtype: of the floating-point tensors; None: their own. Narrower ones are cast before they travel.
    bucket_nbytes: of a bucket's tensors, unless a single one is larger. While a bucket is gathered a rank holds it, and
        the messages it arrives in, about as many bytes; so ranks need memory for two buckets, not for the model.

    Iterating is collective: all ranks that hold parts iterate, outside of a step, and each gets all tensors, which are
    the caller's from then on. A rank waits for the others before each bucket and at the end, on the host: however slow
    one of them is with its bucket, no message waits on a device, and no rank trains on alone. A rank that leaves the
    loop early, or raises in it, is an error by name on the others, unless all leave it at the same bucket. Each bucket
    costs one all-gather for each mesh axis over which its tensors are sharded.

    Raises `ValueError` for names that do not fit, and `OverflowError` on all ranks where finite values become inf
    in `dtype`. Shapes are in elements, of the whole tensor.
    """
    expect_module("model", model)
    fits = dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)
    expect("dtype", fits, "a floating-point dtype or None", dtype, "pass torch.bfloat16, for example")
    rules = names is None or callable(names) or isinstance(names, Mapping)
    expect("names", rules, "a mapping, a function or None", names, "see docs/how-to/hand-over.md")
    expect_whole("bucket_nbytes", bucket_nbytes, 1)
    return Weights(model, names, dtype, bucket_nbytes)


class Weights:
    """The result of `weights`: iterate it for buckets. It reads the model anew each time, and holds no tensors."""

    def __init__(self, model: nn.Module, names: Names, dtype: torch.dtype | None, bucket_nbytes: int) -> None:
        self._model, self._dtype, self._bucket_nbytes = model, dtype, bucket_nbytes
        self._places, problems = places_of(named_state(model))
        found = rename(names, {name: place.shape for name, place in self._places.items()})
        problems = [*problems, *found.problems]
        if problems:
            raise ValueError(f"weights: expected names and tensors that fit, found {'; '.join(problems[:8])}")
        self._links, self._shapes = found.links, found.shapes
        self._of_target: dict[str, list[Link]] = {}
        for link in self._links:
            self._of_target.setdefault(link.target, []).append(link)
        mixed = [name for name, links in self._of_target.items() if len({self._dtype_of(one) for one in links}) > 1]
        if mixed:
            raise ValueError(
                f"weights: expected one dtype of what becomes {mixed[0]}, found "
                f"{sorted({str(self._dtype_of(one)) for one in self._of_target[mixed[0]]})}; pass dtype="
            )

    def _dtype_of(self, link: Link) -> torch.dtype:
        dtype = dtype_named(self._places[link.source].dtype)
        return self._dtype if self._dtype is not None and dtype.is_floating_point else dtype

    def metadata(self) -> list[WeightInfo]:
        """Name, dtype and shape of each tensor, in the order in which they come. No message."""
        return [
            WeightInfo(name, self._dtype_of(links[0]), self._shapes[name])
            for number in self._buckets()
            for name, links in number
        ]

    def boxes(self) -> list[WeightPart]:
        """This rank's parts of the tensors, with their offsets. No message."""
        held = named_state(self._model)
        found = []
        for name, links in self._of_target.items():
            for link in links:
                box = _own_box(self._places[link.source], held[link.source])
                common = None if box is None else link.common(box, whole(self._shapes[name]))
                if box is None or common is None:
                    continue
                part = _view(local_data(held[link.source]).detach(), box, link, common)
                at = tuple(o + a for o, a in zip(common.offsets, link.at_target, strict=True))
                if link.lifted == "target":
                    part, at = part.squeeze(0), at[1:]
                dtype = self._dtype_of(link)
                found.append(WeightPart(name, dtype, self._shapes[name], at, part.to(dtype)))
        return found

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) one after the other, as vLLM's weight source has them; otherwise as the buckets."""
        for bucket in self:
            yield from bucket

    def __len__(self) -> int:
        """The number of buckets."""
        return len(self._buckets())

    def __iter__(self) -> Iterator[Bucket]:
        held = named_state(self._model)
        buckets = self._buckets()
        meeting = _Meeting(self._model, len(buckets))
        for number, bucket in enumerate(buckets):
            problem = self._overflow(bucket, held)
            meeting.turn(number, problem, [link.source for _, links in bucket for link in links], self._dtype)
            with together_over(meeting.meshes, f"weights: bucket {number + 1} of {len(buckets)}"):
                made = self._gather(bucket, held)
            try:
                yield made
            except BaseException:
                meeting.leave(number)
                raise
            del made
        meeting.turn(len(buckets), -1, [], None)

    # ---- buckets -------------------------------------------------------------------------------------------

    def _buckets(self) -> list[_Targets]:
        """Targets, each with what it is made of. Those that share a source, or a tie, are in one bucket: it travels
        once."""
        together: list[tuple[set[str], _Targets]] = []
        at: dict[str, tuple[set[str], _Targets]] = {}
        for name, links in self._of_target.items():
            sources = {self._places[link.source].same_as for link in links}
            known = [one for one in dict.fromkeys(id(at[s]) for s in sources if s in at)]
            joined = [one for one in together if id(one) in known]
            if not joined:
                joined = [(set(), [])]
                together.append(joined[0])
            first = joined[0]
            for other in joined[1:]:
                first[0].update(other[0])
                first[1].extend(other[1])
                together.remove(other)
            first[0].update(sources)
            first[1].append((name, links))
            at.update(dict.fromkeys(first[0], first))
        buckets, used = list[_Targets](), 0
        for _, targets in together:
            nbytes = sum(whole(self._shapes[name]).numel * self._dtype_of(links[0]).itemsize for name, links in targets)
            if not buckets or used + nbytes > self._bucket_nbytes:
                buckets.append([])
                used = 0
            buckets[-1].extend(targets)
            used += nbytes
        return buckets

    def _overflow(self, bucket: _Targets, held: dict[str, Tensor]) -> int:
        """The first of the bucket's links whose local part has a finite value that becomes inf; -1: none."""
        links = [link for _, links in bucket for link in links]
        for number, link in enumerate(links):
            if overflows(local_data(held[link.source]), self._dtype_of(link)):
                return number
        return -1

    def _gather(self, bucket: _Targets, held: dict[str, Tensor]) -> Bucket:
        sources: dict[str, list[Link]] = {}
        for _, links in bucket:
            for link in links:
                sources.setdefault(self._places[link.source].same_as, []).append(link)
        with torch.inference_mode(False), torch.no_grad():
            made: dict[object, Tensor] = {}
            named: dict[str, Tensor] = {}
            for name, links in bucket:
                # Tied tensors that are made in the same way are one.
                key = tuple((self._places[link.source].same_as, *link[2:]) for link in links)
                if key not in made:
                    device = _message_device(held[links[0].source])
                    made[key] = torch.empty(self._shapes[name], dtype=self._dtype_of(links[0]), device=device)
                named[name] = made[key]
            for (mesh, axes), members in _classes(sources, held).items():
                self._gather_class(mesh, axes, {name: sources[name] for name in members}, held, named)
        return [(name, named[name]) for name, _ in bucket]

    def _gather_class(
        self,
        mesh: DeviceMesh | None,
        axes: tuple[int, ...],
        sources: dict[str, list[Link]],
        held: dict[str, Tensor],
        named: dict[str, Tensor],
    ) -> None:
        """Gather tensors that are sharded over the same axes of a mesh, by one all-gather for each axis."""
        if mesh is None or not axes:
            for name, links in sources.items():
                _put(local_data(held[name]), whole(self._places[name].shape), links, named)
            return
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        layout: list[tuple[str, torch.dtype, int, int]] = []  # name, dtype on the wire, padded elements, first byte
        total = 0
        wire = {
            name: _wire(dtype_named(self._places[name].dtype), self._dtype_of(links[0]))
            for name, links in sources.items()
        }
        for name in sorted(sources, key=lambda name: -wire[name].itemsize):
            place, dtype = self._places[name], wire[name]
            assert place.mesh is not None
            # The rank at the origin has the largest part.
            numel = local_box(place.shape, place.mesh, (0,) * len(place.mesh), place.cuts).numel
            layout.append((name, dtype, numel, total))
            total += numel * dtype.itemsize
        device = next(iter(named.values())).device
        # The pieces of all ranks stay aligned.
        piece = torch.empty(align_up(total, _ALIGNMENT), dtype=torch.uint8, device=device)
        for name, dtype, _, at in layout:
            local = local_data(held[name])
            piece[at : at + local.numel() * dtype.itemsize].view(dtype).view(local.shape).copy_(local)
        groups = [mesh.get_group(axis) for axis in axes]
        arrived = gathered(piece, groups, "weights")
        del piece
        for there in positions([mesh.size(axis) for axis in axes]):
            at_mesh = list(coordinate)
            for axis, index in zip(axes, there, strict=True):
                at_mesh[axis] = index
            for name, dtype, _, at in layout:
                place = self._places[name]
                assert place.mesh is not None
                box = local_box(place.shape, place.mesh, at_mesh, place.cuts)
                if box.numel:
                    part = arrived[there][at : at + box.numel * dtype.itemsize].view(dtype).view(box.lengths)
                    _put(part, box, sources[name], named)


_Targets = list[tuple[str, list[Link]]]


def _own_box(place: Place, tensor: Tensor) -> Box | None:
    """This rank's part; None on a rank outside of the mesh."""
    if not isinstance(tensor, DTensor) or place.mesh is None:
        return whole(place.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    return None if coordinate is None else local_box(place.shape, place.mesh, coordinate, place.cuts)


def _put(part: Tensor, box: Box, links: list[Link], named: dict[str, Tensor]) -> None:
    """Copy `part`, which is `box` of a source, to where its links have it."""
    for link in links:
        target = named[link.target]
        shape = whole(tuple(target.shape))
        common = link.common(box, shape)
        if common is not None:
            there = target.unsqueeze(0) if link.lifted == "target" else target
            for dim, (offset, length) in enumerate(zip(*common, strict=True)):
                there = there.narrow(dim, offset + link.at_target[dim], length)
            there.copy_(_view(part, box, link, common))


def _view(part: Tensor, box: Box, link: Link, common: Box) -> Tensor:
    """`common`, in coordinates of the link, of `part`, which is `box` of its source."""
    at = link.of_source(box).offsets
    part = part.unsqueeze(0) if link.lifted == "source" else part
    for dim, (offset, length) in enumerate(zip(*common, strict=True)):
        part = part.narrow(dim, offset - at[dim], length)
    return part


def _wire(source: torch.dtype, target: torch.dtype) -> torch.dtype:
    return target if target.itemsize < source.itemsize else source


def _classes(
    sources: dict[str, list[Link]], held: dict[str, Tensor]
) -> dict[tuple[DeviceMesh | None, tuple[int, ...]], list[str]]:
    """Sources by mesh and the axes over which they are sharded."""
    found: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[str]] = {}
    for name in sources:
        tensor = held[name]
        mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
        axes = tuple(
            axis
            for axis, placement in enumerate(tensor.placements if isinstance(tensor, DTensor) else ())
            if cut_dim(placement) is not None and mesh is not None and mesh.size(axis) > 1
        )
        found.setdefault((mesh, axes), []).append(name)
    return found


def _message_device(tensor: Tensor) -> torch.device:
    """Where the full tensor is gathered: where the shard is, or on the device of its group, if that has no backend
    there."""
    device = local_data(tensor).device
    if not isinstance(tensor, DTensor):
        return device
    elsewhere = message_device(str(dist.get_backend_config(tensor.device_mesh.get_group(0))), device)
    return device if elsewhere is None else torch.device(elsewhere)


# ---- state -----------------------------------------------------------------------------------------------------------


def named_state(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and persistent buffers of `model`, under the names of the plain model; sharded where they are
    sharded. Tied ones under each name."""
    state = model.state_dict(keep_vars=True)
    return {clean_name(name): settled(value) for name, value in state.items() if isinstance(value, Tensor)}


# Of the bytes of a rank in a message: a multiple of every itemsize.
_ALIGNMENT = 16
# Elements that are looked at together where values may overflow.
_CHUNK = 1 << 20


def overflows(local: Tensor, dtype: torch.dtype) -> bool:
    """Whether a finite value of `local` is none in `dtype`."""
    if not (local.dtype.is_floating_point and dtype.is_floating_point) or not local.numel() or local.is_meta:
        return False
    most = torch.finfo(dtype).max
    if most >= torch.finfo(local.dtype).max:
        return False
    local = local.detach()
    if local.itemsize > 1:  # 8 bits have no such reduction
        low, high = torch.stack(torch.aminmax(local)).double().tolist()
        if -most <= low and high <= most:  # false for NaN
            return False
    flat = local.reshape(-1)
    return any(
        bool((chunk.float().isfinite() & ~chunk.to(dtype).float().isfinite()).any()) for chunk in flat.split(_CHUNK)
    )


# ---- meetings --------------------------------------------------------------------------------------------------------


class _Meeting:
    """All ranks that hold parts of a model, between its buckets, on the host: no message waits on a device for a rank
    that is slow with its bucket."""

    def __init__(self, model: nn.Module, buckets: int) -> None:
        self._buckets = buckets
        tensors = [tensor for tensor in named_state(model).values() if isinstance(tensor, DTensor)]
        self.meshes = list(dict.fromkeys(t.device_mesh for t in tensors if t.device_mesh.get_coordinate() is not None))
        host = torch.device("cpu")
        self._groups = [ranks_of(group, host) for group in joining_groups(self.meshes)]

    def _largest(self, values: list[int], what: str) -> list[int]:
        for ranks in self._groups:
            with ranks.texts.together(what):
                values = ranks.texts.largest(values)
        return values

    def turn(self, number: int, problem: int, sources: list[str], dtype: torch.dtype | None) -> None:
        """All ranks come to bucket `number`. Raises on all if one of them left before, or has a problem."""
        what = f"weights: bucket {number + 1} of {self._buckets}" if number < self._buckets else "weights: the end"
        left, bad, at, earlier = self._largest([0, problem + 1, number, -number], what)
        if left:
            raise RuntimeError(
                f"weights: expected all ranks to leave the loop at the same bucket, found that rank {left - 1} left it "
                f"or raised at an earlier one than number {number} of {self._buckets}; see that rank's output"
            )
        if at != -earlier:
            raise RuntimeError(f"weights: expected all ranks at the same bucket, found some at {-earlier} and {at}")
        if bad:
            raise OverflowError(
                f"weights: expected finite values in {dtype}, found larger ones in {sources[bad - 1]}; pass another "
                f"dtype="
            )

    def leave(self, number: int) -> None:
        """This rank leaves the loop at bucket `number`: the others learn of it when they come to the next one."""
        with contextlib.suppress(RuntimeError, OSError):  # it leaves anyway
            me = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
            self._largest([me + 1, 0, number, -number], f"weights: left at bucket {number + 1} of {self._buckets}")
