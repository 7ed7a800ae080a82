"""Parameters whose tensor subclass defines how it is gathered: quantised weights, float8 and the like.

    fsdp_pre_all_gather(mesh) -> (inputs, metadata)
    fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy) -> (inputs, metadata)
        on the local shard: the tensors to send, of any dtype, and any metadata for the other method
    fsdp_post_all_gather(outputs, metadata, param_dtype, *, out=None) -> (unsharded, inner_tensors), or None with `out`
        `outputs[i]`: the inputs of all ranks, concatenated on dim 0. `inner_tensors`: the tensors that own the memory
        of `unsharded`; it is freed with that of `outputs` when the parameter is freed. `out` is the tensor of an
        earlier call, to be filled again: its memory is allocated, its contents are gone.

Names and meaning are torch's (FSDP2), with one deliberate difference. If the dim is not divisible by the number of
ranks, torch asks short ranks to pad in `fsdp_pre_all_gather` and raises on those that did not, while the other ranks
hang in the gather. Here the shape of the whole tensor decides, which is the same on every rank: all ranks call the
method on a shard of the padded shape, with zeros at the end.

The methods belong to the tensor's class, or are set on one shard alone, `parameter._local_tensor`, between
`fully_shard` and the first forward (`set_apart`). On anything else torch does not see them; here that is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._torch import keeping_versions, local_of, settled
from ..layout import contiguous_stride
from ..policy import Precision
from .group import DtypeChanged, ParamGroup
from .sharded import GATHER_METHODS, Placing, ShardedParam, claim, has_extension
from .swap import Found, OwnedMemory, Swap, TrackedMemory


def extended_since(group: ParamGroup) -> list[ShardedParam]:
    """The parameters of `group` on whose local tensors both methods were set since it was made. `AssertionError` for
    one without the other."""
    if isinstance(group, ExtensionGroup):
        return []
    standing = [(param, param.slots[0].get()) for param in group.params]
    return [param for param, found in standing if isinstance(found, DTensor) and has_extension(found, param.name)]


def set_apart(group: ParamGroup, params: Sequence[ShardedParam], mp_policy: Any) -> list[ParamGroup]:
    """The groups in place of `group`: what is left of it, then an `ExtensionGroup` for each of `params`."""
    rest = [param for param in group.params if param not in params]
    # First what may be refused.
    made: list[ParamGroup] = [ExtensionGroup.of(group, param, mp_policy) for param in params]
    if len(rest) == len(group.params):
        return [group]
    return [group.converted(group.precision, rest), *made] if rest else made


class ExtensionGroup(ParamGroup):
    """A group of one such parameter. Its shard is a separate tensor, not a view of a flat buffer."""

    memory: TrackedMemory  # type: ignore[assignment]

    def __init__(self, found: Sequence[Found], precision: Precision, placing: Placing, mp_policy: Any) -> None:
        (only,) = found
        _refuse(only.name, only.dim, placing)
        self._begin(_own_policy(mp_policy, precision), only.slots[0].module)
        super().__init__(found, precision, placing)
        # The check for unwritten memory handles plain tensors only, not this subclass.
        self.has_uninitialized = False

    @classmethod
    def of(cls, group: ParamGroup, param: ShardedParam, mp_policy: Any) -> ExtensionGroup:
        """The group of `param` alone, one of `group`, whose local tensor got the methods. The parameter and its local
        tensor stay the same objects."""
        _refuse(param.name, param.layout.dim, group.placing)
        local = local_of(param.slots[0].get())  # type: ignore[arg-type]
        if param.layout.padding_numel or group.placing.offload.to_host:
            _refuse_unbound(param.name, local)
        made = object.__new__(cls)
        made._begin(_own_policy(mp_policy, group.precision), param.slots[0].module)
        made.placing, made.params, made.has_uninitialized = group.placing, [param], False
        made.swap = Swap((0, slot) for slot in param.slots)
        made._set_precision(group.precision)
        made._make_plan()
        # Memory of its own, not the unit's.
        local.data = local.detach().clone()
        made.rebase()
        return made

    def _begin(self, mp_policy: Any, module: nn.Module) -> None:
        self._mp_policy = mp_policy
        self._module = module
        self._metadata: Any = None
        self._outputs: list[Tensor] = []
        self._signature: tuple[tuple[torch.Size, torch.dtype], ...] = ()
        # The full parameter exists; it was made by the last `assemble`.
        self._is_made = self._is_new = False

    # ---- making --------------------------------------------------------------------------------------------

    @cached_property
    def shares_memory(self) -> bool:
        return False

    def _make_flat(self, device: torch.device) -> None:
        # Empty; it only records the device of the shard.
        self.flat = torch.empty(0, dtype=self.precision.storage, device=device)

    def fill(self, param: ShardedParam, source: Tensor) -> None:
        """Write the shard as `ParamGroup` does; the first call also makes the shard, of the class of `source`."""
        if isinstance(source, DTensor):
            source = settled(local_of(source))
        rank, layout = self.placing.rank, param.layout
        with torch.no_grad():
            source = source.detach().narrow(layout.dim, layout.start(rank), layout.rows(rank))
            if getattr(param, "local", None) is None:
                # A copy: a view would keep the whole tensor alive.
                local = source.new_zeros(layout.local_shape(rank))
                param.local = local if local.is_meta else local.to(self.flat.device)
            if not source.is_meta and not param.local.is_meta:
                param.local.copy_(source)

    def _make_full(self) -> None:
        """Only the tensor's own methods can make a full parameter, so none exists before the first gather. Until then
        an empty placeholder is used, which is never put on a module."""
        (param,) = self.params
        self.memory = TrackedMemory()
        self.memory.keeps = self._keeps_storage
        self._outputs, self._signature, self._is_made = [], (), False
        self._set_full(nn.Parameter(torch.empty(0), requires_grad=param.sharded.requires_grad))
        self.trainable = ()
        self._note_shards()
        self.swap.shards = self.swap.spread(self._shards.parameters)

    def _note_shards(self) -> None:
        super()._note_shards()
        self._shards = self._shards._replace(plain=[])

    def _set_full(self, full: nn.Parameter) -> None:
        (param,) = self.params
        if param.gradients.shown is not None:
            param.gradients.withdraw()
        param.full = full
        self.full_ids = {id(full)} | ({id(local_of(full))} if isinstance(full, DTensor) else set())
        self.fulls = [full]
        self.swap.fulls = self.swap.spread(self.fulls)

    def rebase(self) -> None:
        (param,) = self.params
        standing = param.slots[0].get()
        self._check_standing(param, standing)
        assert standing is not None
        if not has_extension(standing, param.name):
            kind = type(local_of(standing)).__name__
            raise RuntimeError(
                f"{param.name}: expected a shard with {' and '.join(GATHER_METHODS)}, found a {kind}; "
                f"copy into the parameter in place"
            )
        claim(standing, param.owner)
        self._keep_grad_dtype(standing)
        param.sharded, param.local = standing, local_of(standing)
        if param.local.dtype is not self.precision.storage:
            raise DtypeChanged(param.local.dtype)
        self._make_flat(param.local.device)
        self._make_full()
        self.swap.put(self.swap.shards)

    # ---- gathering (comm.extension) ------------------------------------------------------------------------

    def messages(self) -> list[tuple[Tensor, Tensor]]:
        """Call the first gather method: see `comm.gather.Extension`, also for the other two."""
        (param,) = self.params
        with torch.inference_mode(False), torch.no_grad():
            inputs = self._inputs(param)
            signature = tuple((tensor.shape, tensor.dtype) for tensor in inputs)
            if signature != self._signature:
                self._make_full()
                self._signature = signature
                for tensor in inputs:
                    owner = OwnedMemory(tensor.nbytes * self.placing.world, torch.uint8, self.placing.device)
                    self._outputs.append(_typed(owner, tensor, self.placing.world))
                    self.memory.track(owner)
            self.memory.allocate()
            return [
                (owner.flat, tensor.contiguous().view(-1).view(torch.uint8))
                for owner, tensor in zip(self.memory.owned, inputs, strict=True)
            ]

    def _inputs(self, param: ShardedParam) -> list[Tensor]:
        local, layout = param.local, param.layout
        if not has_extension(local, param.name):
            raise RuntimeError(
                f"{param.name}: expected a shard with {' and '.join(GATHER_METHODS)}, found that they were taken off "
                f"its local tensor; leave them there, and make the model again to gather it without"
            )
        if local.device != self.placing.device:
            local = local.to(self.placing.device, non_blocking=True)
        if layout.padding_numel:
            # On every rank, also those with a whole shard: an unsupported operation then fails everywhere.
            padded = local.new_zeros(layout.padded_local_shape)
            padded.narrow(layout.dim, 0, local.shape[layout.dim]).copy_(local)
            local = padded
        method = _pre_method(param.local, local)
        mesh = _shard_mesh(self.placing.mesh)
        if len(inspect.signature(method).parameters) == 1:
            result = method(mesh)
        else:
            stride = contiguous_stride(layout.shape)
            result = method(mesh, torch.Size(layout.shape), stride, self._module, self._mp_policy)
        if not (isinstance(result, tuple) and len(result) == 2 and all(isinstance(t, Tensor) for t in result[0])):
            raise TypeError(
                f"{param.name}: expected fsdp_pre_all_gather to return (tensors to send, metadata), found "
                f"{result!r:.200}; return a tuple of tensors and anything else"
            )
        inputs, self._metadata = list(result[0]), result[1]
        return inputs

    def assemble(self) -> None:
        (param,) = self.params
        method: Any = param.local.fsdp_post_all_gather  # type: ignore[attr-defined]
        outputs, dtype = tuple(self._outputs), self.precision.compute
        with torch.inference_mode(False), torch.no_grad():
            if self._is_made:
                out = local_of(param.full) if isinstance(param.full, DTensor) else param.full
                # Refilling the tensor is no edit of the values that autograd saved.
                with keeping_versions(param.full, out):
                    method(outputs, self._metadata, dtype, out=out)
                return
            unsharded, inner = method(outputs, self._metadata, dtype)
            for tensor in inner:
                self.memory.track_storage(tensor.untyped_storage())
            if tuple(unsharded.shape) != param.layout.shape:
                unsharded = unsharded.narrow(param.layout.dim, 0, param.layout.shape[param.layout.dim])
        self._set_full(self._full_parameter(param, unsharded))
        self._is_made = self._is_new = True

    def release(self) -> None:
        self.memory.release()

    def show_full(self) -> bool:
        is_new, self._is_new = self._is_new, False
        return super().show_full() or is_new


def _own_policy(mp_policy: Any, precision: Precision) -> Any:
    """The policy that the tensor's methods see: as in torch, that of their parameter alone."""
    if getattr(mp_policy, "param_dtype_override_fn", None) is None:
        return mp_policy
    return replace(mp_policy, param_dtype=precision.wanted.compute, param_dtype_override_fn=None)


def _shard_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The sharding axis as a mesh of its own."""
    if mesh.ndim == 1:
        return mesh
    assert mesh.mesh_dim_names is not None
    return mesh[mesh.mesh_dim_names[-1]]


def _refuse(name: str, dim: int, placing: Placing) -> None:
    """Raise `NotImplementedError` for a parameter that cannot be gathered by methods of its own."""
    if dim != 0:
        raise NotImplementedError(
            f"{name}: expected Shard(0) for a parameter with fsdp_pre_all_gather, found dim {dim}; "
            f"leave it out of shard_placement_fn, because its methods only handle rows"
        )
    if not placing.shards and placing.mesh.size() > 1:
        raise NotImplementedError(
            f"{name}: expected a mesh with an axis that shards, for fsdp_pre_all_gather, found "
            f"{placing.mesh}, which only replicates; use a 2-D mesh whose last axis has size 1"
        )


def _refuse_unbound(name: str, local: Tensor) -> None:
    """Raise `NotImplementedError` if `_pre_method` could not call it on another tensor."""
    method = local.__dict__.get(GATHER_METHODS[0])
    if method is not None and not (isinstance(method, MethodType) and method.__self__ is local):
        raise NotImplementedError(
            f"{name}: expected {GATHER_METHODS[0]} bound to the local tensor, types.MethodType(function, local), found "
            f"{method!r:.100}, while the shard is padded or on the host: the function is called on a copy, its `self`"
        )


def _pre_method(local: Tensor, copy: Any) -> Any:
    """The first method, for a padded or moved `copy` of `local`, or for `local` itself."""
    own = local.__dict__.get(GATHER_METHODS[0])
    return copy.fsdp_pre_all_gather if own is None or copy is local else MethodType(own.__func__, copy)


def _typed(owner: OwnedMemory, like: Tensor, world: int) -> Tensor:
    """The gathered tensor: `world` times `like`, concatenated, on the memory of `owner`. It has its own version
    counter, so an arriving message does not count as an edit of it."""
    shape = (world * like.shape[0], *like.shape[1:]) if like.ndim else (world,)
    view = torch.empty(0, dtype=like.dtype, device=owner.flat.device)
    view.set_(owner.flat.untyped_storage(), 0, shape, contiguous_stride(shape))
    return view
