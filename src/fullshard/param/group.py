"""The parameters of one unit that travel together: equal storage dtype, one flat buffer, one plan.

    flat    (padded_local_numel,) storage dtype    this rank's shards; every `local` is a view of it
    full    `param.memory`, compute dtype          the padded full parameters; every `full` parameter is a view of it

Knows tensors and layouts only: no phases, no collectives (a `comm` channel is passed in), no policy beyond dtypes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.dlpack import from_dlpack, to_dlpack

from .._torch import (
    copied_into_one,
    dtensor_like,
    grad_dtype_of,
    hand_over_hooks,
    local_of,
    others_with_memory_of,
    set_local,
    settled,
    sharded_parameter,
    version_of,
)
from ..layout import (
    FlatLayout,
    ShardLayout,
    align_numel,
    contiguous_stride,
    direct_indices,
    plan_gather,
    secondary_layout,
)
from ..policy import Precision
from .sharded import (
    GATHER_METHODS,
    NormMesh,
    Placing,
    ShardedParam,
    claim,
    class_of,
    cut_shape,
    full_of,
    own_spec,
    sharded_spec,
)
from .swap import Found, OwnedMemory, SharedMemory, Swap
from .unwritten import poison

# ---- group -----------------------------------------------------------------------------------------------------------

_requires_grad = operator.attrgetter("requires_grad")
_gradient = operator.attrgetter("grad")
_has_no_gradient = partial(operator.is_, None)
_marks = operator.attrgetter("__dict__")
_has_no_methods = frozenset(GATHER_METHODS).isdisjoint


class _Shards(NamedTuple):
    """The sharded parameters of a group as flat lists: they are compared several times per step."""

    parameters: list[nn.Parameter]
    locals: list[Tensor]
    storages: list[torch.UntypedStorage]
    # Local tensors that should have no gather methods.
    plain: list[Tensor]


class ParamGroup:
    """Holds the tensors of the table above. `params` keep the order of the modules; `trainable` are the positions that
    get gradients. The modules stay unchanged until `take_back`."""

    # The user's setting, which outlives `memory`.
    _keeps_storage = False

    def __init__(self, found: Sequence[Found], precision: Precision, placing: Placing) -> None:
        self.placing = placing
        self.params = [
            ShardedParam(
                f.name,
                f.slots,
                ShardLayout(cut_shape(f), f.dim, placing.world),
                sharded_spec(f, placing),
                own_spec(f),
                class_of(f.parameter),
            )
            for f in found
        ]
        self._set_precision(precision)
        self._make_plan()
        on_meta = [f.parameter.is_meta for f in found]
        self._make_flat(torch.device("meta") if all(on_meta) else placing.shard_device)
        # Next to parameters with data, those on the meta device get memory that is marked as unwritten.
        self.has_uninitialized = any(on_meta) and not all(on_meta)
        for param, source in zip(self.params, found, strict=True):
            self.fill(param, source.parameter)
            param.sharded = self._dtensor(param, source.parameter.requires_grad)
            self._keep_grad_dtype(param.sharded)
            # Attributes that callers set on the parameter (optimizer groups, initialisers) and hooks stay with it.
            param.sharded.__dict__.update(source.parameter.__dict__)
            hand_over_hooks(source.parameter, param.sharded)
            param.marks = param.sharded.__dict__
            if placing.unit_mesh is not None:
                NormMesh.note(param.sharded, param.spec.mesh, placing.unit_mesh)
        self.swap = Swap((i, slot) for i, param in enumerate(self.params) for slot in param.slots)
        self._make_full()

    def converted(self, precision: Precision, params: list[ShardedParam] | None = None) -> ParamGroup:
        """This group, remade for parameters on the modules that changed their storage dtype, or for `params` alone."""
        group = object.__new__(type(self))
        group.__dict__.update(self.__dict__)
        if params is not None:
            group.params = params
            group.swap = Swap((i, slot) for i, param in enumerate(params) for slot in param.slots)
        group._set_precision(precision)
        group.has_uninitialized = False
        group._make_plan()
        group.rebase()
        return group

    # ---- making --------------------------------------------------------------------------------------------

    def _set_precision(self, precision: Precision) -> None:
        if any(param.own_spec is not None and param.own_spec.replicated_somewhere for param in self.params):
            # Gradients that were added over the parameter's own mesh are wider than those of one rank. Sent in the
            # dtype of the sum, they are rounded once.
            precision = precision._replace(wire=precision.reduce)
        self.precision = precision
        for param in self.params:
            param.precision = precision

    def _make_plan(self) -> None:
        precision, placing = self.precision, self.placing
        layouts = [param.layout for param in self.params]
        alignment = align_numel(dtype.itemsize for dtype in (precision.storage, precision.compute, precision.wire))
        itemsize, on_host = precision.compute.itemsize, placing.device.type == "cpu"
        backend, threshold = placing.backend, placing.direct_nbytes
        first = direct_indices(layouts, itemsize, backend=backend, direct_threshold_nbytes=threshold, on_host=on_host)
        self.pack = FlatLayout.build(
            layouts,
            alignment,
            first=first,
            names=[param.name for param in self.params],
            # With one rank the full tensors have the offsets of the shards: the same memory, or one cast.
            full_align_numel=alignment if placing.world == 1 else None,
        )
        self.plan = plan_gather(
            self.pack, itemsize, backend=backend, direct_threshold_nbytes=threshold, on_host=on_host
        )

    def _make_flat(self, device: torch.device) -> None:
        pin = self.placing.offload.pin and device.type == "cpu"
        numel, dtype = self.pack.padded_local_numel, self.precision.storage
        self.flat = torch.zeros(numel, dtype=dtype, device=device, pin_memory=pin)
        for param, part, shape in self._parts():
            param.local = part.new_empty(0)
            param.local.data = _own_storage(part).view(shape)  # no view, which its base would hold, too

    @cached_property
    def shares_memory(self) -> bool:
        """Whether the full parameters are the shards: one rank, one dtype, one device."""
        same_dtype = self.precision.storage is self.precision.compute
        return self.placing.world == 1 and same_dtype and not self.placing.offload.to_host

    def _make_full(self) -> None:
        offloaded = self.placing.offload.to_host and not self.flat.is_meta
        device = self.placing.device if offloaded else self.flat.device
        self.memory: OwnedMemory | SharedMemory
        if self.shares_memory:
            self.memory = SharedMemory(self.flat)
        else:
            self.memory = OwnedMemory(self.pack.full_numel, self.precision.compute, device)
        # Saved tensors are these tensors or views of them: full parameters, and the local tensors of DTensors.
        self.full_ids: set[int] = set()
        storage = self.memory.flat.untyped_storage()
        base = self.memory.flat.storage_offset()
        for param, offset in zip(self.params, self.pack.full_offsets, strict=True):
            shape = param.layout.shape
            view = torch.empty(0, dtype=self.precision.compute, device=device)
            # Separate tensors on the same storage: autograd counts their versions separately, so refilling the memory
            # does not count as an edit of tensors saved in forward.
            view.set_(storage, base + offset, shape, contiguous_stride(shape))
            if param.gradients.shown is not None:
                param.gradients.withdraw()
            param.full = self._full_parameter(param, view)
            self.full_ids.add(id(param.full))
            if param.own_spec is not None:
                self.full_ids.add(id(view))
        self.memory.keeps = self._keeps_storage
        self.memory.release()
        self.trainable: tuple[int, ...] = ()
        self._note_shards()
        self.fulls = [param.full for param in self.params]
        self.swap.shards = self.swap.spread(self._shards.parameters)
        self.swap.fulls = self.swap.spread(self.fulls)

    def _full_parameter(self, param: ShardedParam, view: Tensor) -> nn.Parameter:
        own = param.own_spec
        if own is None:
            # One dict for both: what a module reads or writes on its parameter (bitsandbytes' `quant_state`) is there
            # in forward and outside of it.
            full = full_of(param, view, param.marks)
        else:
            full = sharded_parameter(
                view,
                mesh=own.mesh,
                placements=own.placements,
                shape=own.shape,
                stride=own.stride,
                requires_grad=param.sharded.requires_grad,
            )
        if self.precision.accepts is not self.precision.compute:
            full.grad_dtype = self.precision.accepts
        return full

    def _dtensor(self, param: ShardedParam, requires_grad: bool) -> nn.Parameter:
        return sharded_parameter(
            param.local,
            mesh=param.spec.mesh,
            placements=param.spec.placements,
            shape=param.spec.shape,
            stride=param.spec.stride,
            requires_grad=requires_grad,
        )

    def _keep_grad_dtype(self, parameter: nn.Parameter) -> None:
        """Give the sharded `parameter` the `grad_dtype` that the original one had, which torch's conversions lose."""
        wanted = self.precision.wanted.grad_dtype
        if wanted != "unset" and grad_dtype_of(parameter) == "unset":
            parameter.grad_dtype = None if wanted == "any" else wanted

    def fill(self, param: ShardedParam, source: Tensor) -> None:
        """Write this rank's part of the whole tensor `source`; one on the meta device has nothing to write."""
        if source.is_meta or self.flat.is_meta:
            poison(param.local)
            return
        if isinstance(source, DTensor):
            source = settled(local_of(source))
        rank, layout = self.placing.rank, param.layout
        start = layout.start(rank)
        with torch.no_grad():
            param.local.copy_(source.detach().narrow(layout.dim, start, layout.rows(rank)))

    def keep_storage(self, keep: bool, *, is_used: bool) -> None:
        """Keep the bytes of the full parameters between uses, at one address, or free them as usual. `is_used`: they
        hold full parameters now, or soon."""
        self._keeps_storage = self.memory.keeps = keep
        if not keep and not is_used:
            self.memory.release()

    # ---- alias repair --------------------------------------------------------------------------------------

    def look(self, standing: Sequence[nn.Parameter] | None = None) -> tuple[bool, bool, tuple[int, ...]]:
        """The state of the shards now; asked at each all-gather, so without Python per parameter.

        Returns whether users still hold the memory of `flat`, without gather methods of its own
        (`extension.set_apart`), and our parameters are still on the modules; whether an optimizer may write the shards,
        which skips frozen parameters without a gradient left; and versions, which change when a shard is written
        through the DTensor or its local tensor (not through .data).

        `to_empty`, `load_state_dict(assign=True)` and swapped parameters break the first. `standing`: the parameters
        that we put on the modules, one per slot, if they are not the shards. Raises as `refuse_ignored` does."""
        shards = self._shards
        if not (
            all(map(_has_no_methods, map(_marks, shards.parameters)))
            and all(map(operator.is_, map(Tensor.untyped_storage, shards.parameters), shards.storages))
        ):
            self.refuse_ignored()
            shards = self._shards
        parameters = shards.parameters
        ours = (
            all(map(operator.is_, map(local_of, parameters), shards.locals))
            and all(map(operator.is_, self.swap.registered(), self.swap.shards if standing is None else standing))
            and all(map(_has_no_methods, map(_marks, shards.plain)))
        )
        may_be_stepped = any(map(_requires_grad, parameters)) or not all(
            map(_has_no_gradient, map(_gradient, parameters))
        )
        return ours, may_be_stepped, (*map(version_of, parameters), *map(version_of, shards.locals))

    def refuse_ignored(self) -> None:
        """Raise `RuntimeError` for what torch allows on a sharded parameter and never looks at: gather methods, and a
        tensor that was assigned to its `.data`, after which the parameter is repaired. The DTensor keeps its rows, so
        the value would be lost."""
        if not all(map(_has_no_methods, map(_marks, self._shards.parameters))):
            (name, *_) = (param.name for param in self.params if not _has_no_methods(_marks(param.sharded)))
            raise RuntimeError(
                f"{name}: expected fsdp_pre_all_gather and fsdp_post_all_gather on its local tensor, found them set on "
                f"the DTensor, where nothing calls them; delete them there, and set them on {name}._local_tensor "
                f"before the first forward"
            )
        # The assignment brings the other tensor's storage. `p.data *= 2` brings back the same one: it wrote the rows.
        if all(map(operator.is_, map(Tensor.untyped_storage, self._shards.parameters), self._shards.storages)):
            return
        names = []
        for param, storage in zip(self.params, self._shards.storages, strict=True):
            p = param.sharded
            # After torch.utils.swap_tensors the rows are others, too, and `rebase` takes them.
            if p.untyped_storage() is not storage and local_of(p) is param.local:
                Tensor.data.__set__(p, dtensor_like(p, param.local))  # type: ignore[attr-defined]
                claim(p, param.owner)
                names.append(param.name if param.owner is None else param.owner.name)
        self._note_shards()
        if names:
            raise RuntimeError(
                f"{', '.join(names)}: expected values that are written into the sharded parameter, found a tensor "
                f"assigned to its .data, which a DTensor ignores; its values are unchanged. Use "
                f"p.copy_(value) under torch.no_grad(), with distribute_tensor(value, p.device_mesh, p.placements) for "
                f"a plain value, load_state_dict, or module.to() for another dtype or device"
            )

    def _note_shards(self) -> None:
        parameters, rows = [param.sharded for param in self.params], [param.local for param in self.params]
        self._shards = _Shards(parameters, rows, [parameter.untyped_storage() for parameter in parameters], rows)

    def rebase(self) -> None:
        """Make a new flat buffer from the tensors with which users replaced our views, and make those views of it.

        Needed after `to_empty`, `.to(device or dtype)`, `load_state_dict(assign=True)` or a swapped parameter. The
        parameter objects on the modules are kept, so an optimizer that holds them continues to work.
        """
        current = []
        for param in self.params:
            standing = param.slots[0].get()
            self._check_standing(param, standing)
            assert standing is not None
            param.sharded = standing
            self._keep_grad_dtype(standing)
            # torch's conversions swap in the attributes of the new tensor, which has none.
            for mark, value in param.marks.items():
                standing.__dict__.setdefault(mark, value)
            param.marks = standing.__dict__
            claim(standing, param.owner)
            if self.placing.unit_mesh is not None:
                NormMesh.note(standing, param.spec.mesh, self.placing.unit_mesh)
            current.append(local_of(standing))
        dtypes = {local.dtype for local in current}
        devices = {local.device for local in current}
        if len({device.type == "meta" for device in devices}) > 1:
            # `to_empty` is running module by module. A later use completes the group, or names the missing ones.
            for param, local in zip(self.params, current, strict=True):
                param.local = local
            return
        if len(dtypes) > 1 or len(devices) > 1:
            raise RuntimeError(
                f"{self.params[0].name} and the parameters sharded with it: expected one dtype and one device, found "
                f"{sorted(map(str, dtypes))} on {sorted(map(str, devices))}; convert the whole module at once"
            )
        storage = current[0].dtype
        if storage is not self.precision.storage:
            raise DtypeChanged(storage)
        self._make_flat(current[0].device)
        with torch.no_grad():
            for param, local in zip(self.params, current, strict=True):
                if not local.is_meta:
                    param.local.copy_(local)
                set_local(param.sharded, param.local)
        self._make_full()
        self.swap.put(self.swap.shards)

    def _check_standing(self, param: ShardedParam, standing: nn.Parameter | None) -> None:
        if standing is not None and not standing.is_leaf:
            raise RuntimeError(
                f"{param.name}: expected a parameter on its module, found a computed tensor (torch.func."
                f"functional_call), whose gradient cannot flow through the shards; call the model with its own "
                f"parameters, pass detached values, or use the unsharded model"
            )
        if isinstance(standing, DTensor) and standing.shape == param.spec.shape:
            local = local_of(standing)
            if tuple(local.shape) == param.layout.local_shape(self.placing.rank):
                return
        found = "nothing" if standing is None else f"{type(standing).__name__} of shape {tuple(standing.shape)}"
        raise RuntimeError(
            f"{param.name}: expected the sharded DTensor parameter of shape {param.spec.shape} on its module, found "
            f"{found}; load or assign DTensors (torch.distributed.tensor.distribute_tensor), or copy into it in place"
        )

    # ---- memory that is given away -------------------------------------------------------------------------
    # The storage of `flat` can be resized; the shards have storages of their own, which know an address.

    def held_elsewhere(self) -> list[str]:
        """The names of parameters with tensors of others on their shards, such as `p.to_local()`."""
        return [
            param.name if param.owner is None else param.owner.name
            for param in self.params
            if param.local.numel() and others_with_memory_of(param.local)
        ]

    def let_go(self) -> None:
        """Take the shards off the memory of `flat`, which may be freed then. Their tensors stay the same objects."""
        for param in self.params:
            if param.local.numel():
                param.local.data = param.local.new_empty(0)

    def take_again(self) -> None:
        """Put the shards on the memory of `flat`, which is there again."""
        for param, part, shape in self._parts():
            param.local.data = _own_storage(part).view(shape)

    def _parts(self) -> Iterator[tuple[ShardedParam, Tensor, tuple[int, ...]]]:
        """Each parameter with the part of `flat` that has its shard, and the shape of the shard."""
        rank = self.placing.rank
        for param, segment in zip(self.params, self.pack.segments, strict=True):
            part = self.flat[segment.offset : segment.offset + segment.layout.local_numel(rank)]
            yield param, part, segment.layout.local_shape(rank)

    # ---- gradients -----------------------------------------------------------------------------------------

    def take_gradients(self, *, with_held: bool) -> list[Tensor | None]:
        """The full gradients to reduce, one for each trainable parameter; None where there is none. `with_held`: with
        those of earlier backwards, in the reduce dtype."""
        sums = self._sums_on_device() if with_held else {}
        taken = []
        for i in self.trainable:
            gradients = self.params[i].gradients
            # Each is summed when those before it were let go: their sums may take twice their bytes.
            taken.append(sums[i] if i in sums else gradients.sum_with_held() if with_held else gradients.fresh)
            gradients.fresh = None
        return taken

    def _sums_on_device(self) -> dict[int, Tensor]:
        """The `sum_with_held` of trainable parameters on a device, by position: two kernels make all of them."""
        dtype, pairs = self.precision.reduce, {}
        for i in self.trainable:
            held, fresh = self.params[i].gradients.live_held(), self.params[i].gradients.fresh
            if held is not None and held.dtype is dtype and fresh is not None and fresh.device.type != "cpu":
                pairs[i] = held, fresh
        if not pairs:
            return {}
        sums = copied_into_one([fresh for _, fresh in pairs.values()], dtype)
        torch._foreach_add_(sums, [held for held, _ in pairs.values()])
        return dict(zip(pairs, sums, strict=True))

    def receive(self, trainable: Sequence[int], parts: Sequence[Tensor | None], *, partial: bool) -> None:
        """Add the result of a reduction of the running backward, for the parameters at the positions `trainable`."""
        for i, part in zip(trainable, parts, strict=True):
            gradients = self.params[i].gradients
            if part is None:
                continue
            if partial:
                gradients.fresh_partial = part if gradients.fresh_partial is None else gradients.fresh_partial + part
            else:
                gradients.reduced = part if gradients.reduced is None else gradients.reduced + part

    # ---- parameters on the modules -------------------------------------------------------------------------

    def show_full(self) -> bool:
        """Put the full parameters on the modules. Returns whether any requires_grad changed since the last time."""
        changed = False
        # Compared as lists: no Python per item in the usual case that nothing changed.
        if list(map(_requires_grad, self.fulls)) != list(map(_requires_grad, self._shards.parameters)):
            changed = True
            for full, shard in zip(self.fulls, self._shards.parameters, strict=True):
                full.requires_grad_(shard.requires_grad)
        self.swap.put(self.swap.fulls)
        return changed

    def lend(self, parameters: Sequence[nn.Parameter]) -> None:
        """Put `parameters`, one for each of `params`, on the modules, until `take_back`."""
        self.swap.put(self.swap.spread(parameters))

    def take_back(self) -> None:
        """Put the sharded parameters on the modules, whatever is there now."""
        self.swap.put(self.swap.shards)


class DtypeChanged(Exception):
    """The parameters changed their storage dtype: the group has to be remade."""

    def __init__(self, storage: torch.dtype) -> None:
        super().__init__(storage)
        self.storage = storage


def _own_storage(part: Tensor) -> Tensor:
    """The same memory as `part`, a 1-D view of the flat buffer, in a storage object of its own.

    So saving or copying one shard takes its own bytes, not the unit's. The DTensor around it gets storage offset 0,
    which torch needs to deep-copy it. The new storage keeps the flat buffer alive.
    """
    if part.is_meta:
        return part
    if part.numel() == 0:
        return part.new_empty(0)
    return from_dlpack(to_dlpack(part))


# ---- secondary shards ------------------------------------------------------------------------------------------------
# The parts that one group keeps between forward and backward when `reshard_after_forward` is an integer k.
#
#     memory   (padded_local_numel,) compute dtype   this rank's part of each full parameter, split over k ranks
#     params   DTensors of them, (Replicate(), Shard(dim)) on the mesh of blocks: on the modules while they are kept
#
# The memory is allocated from `keep` to `release`. Knows tensors only: no phases, no collectives.


class SecondaryGroup:
    """The secondary shards of `group`, whose tensors it shares; remade when those are. `mesh`: (blocks, k)."""

    def __init__(self, group: ParamGroup, mesh: DeviceMesh) -> None:
        rank = mesh.get_local_rank(1)
        self._group = group
        self.pack = pack = secondary_layout(group.pack, group.plan.direct, mesh.size(1))
        full = group.memory
        # Views need memory that exists.
        in_use = full.live_nbytes > 0
        full.allocate()
        self.memory = OwnedMemory(pack.padded_local_numel, full.flat.dtype, full.flat.device)
        self._sources, self._parts, self.params = [], [], []
        for param, segment, offset in zip(group.params, pack.segments, pack.full_offsets, strict=True):
            layout = segment.layout
            shape = layout.local_shape(rank)
            stride = contiguous_stride(shape)
            full_stride = contiguous_stride(layout.shape)
            start = offset + layout.start(rank) * full_stride[layout.dim]
            self._sources.append(full.flat.as_strided(shape, full_stride, start))
            part = self.memory.flat.as_strided(shape, stride, segment.offset)
            self._parts.append(part)
            param.kept = sharded_parameter(
                part,
                mesh=mesh,
                placements=(Replicate(), Shard(layout.dim)),
                shape=param.spec.shape,
                stride=param.spec.stride,
                requires_grad=param.sharded.requires_grad,
            )
            self.params.append(param.kept)
        if not in_use:
            full.release()
        self.memory.release()
        self._slot_params = group.swap.spread(self.params)

    def keep(self) -> None:
        """Copy this rank's part out of the full parameters, which must be in memory."""
        self.memory.allocate()
        torch._foreach_copy_(self._parts, self._sources)

    def release(self) -> None:
        """Free the kept parts."""
        self.memory.release()

    def show(self) -> None:
        """Put the kept parts on the modules."""
        for kept, param in zip(self.params, self._group.params, strict=True):
            if kept.requires_grad != param.sharded.requires_grad:
                kept.requires_grad_(param.sharded.requires_grad)
        self._group.swap.put(self._slot_params)

    def show_shards(self) -> None:
        """Put the sharded parameters back in place of the kept parts."""
        self._group.swap.show_shards(self._slot_params)

    def is_whole(self) -> bool:
        """Whether users hold our memory (`ParamGroup.look`), and kept parts or shards are on the modules."""
        return self._group.look(self._slot_params)[0] or self._group.look()[0]
