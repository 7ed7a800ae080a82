"""`FullyShardedDataParallel` of FSDP1 on fullshard's runtime, for programs that cannot change yet.

    from fullshard.compat.fsdp1 import FullyShardedDataParallel as FSDP, MixedPrecision, ShardingStrategy

Enums, configs and policies are torch's own. One notice is given for each argument that no longer matters.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import fullshard
from fullshard import FSDPModule, GradScaler, checkpoint, fully_shard
from fullshard.migrate.code.arguments import FSDP1, MIXED_PRECISION
from fullshard.migrate.initialise import send_values
from fullshard.migrate.states import in_form
from fullshard.migrate.ties import resolve_ties
from fullshard.migrate.tree import Tree
from fullshard.migrate.wrapping import UnitPlan, inner_first

from .fsdp1_types import (
    BackwardPrefetch,
    CPUOffload,
    CustomPolicy,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    ModuleWrapPolicy,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CustomPolicy",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "ModuleWrapPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedGradScaler",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]

ShardedGradScaler = GradScaler

_INNER = "_fsdp_wrapped_module"
_UNSET: Any = object()
# Arguments that are taken and change nothing.
_OF_UNITS = ("mixed_precision", "cpu_offload", "sharding_strategy")
WITHOUT_EFFECT = ("backward_prefetch", "forward_prefetch", "limit_all_gathers", "use_orig_params", "device_id")


_WRAPPED: weakref.WeakSet[Any] = weakref.WeakSet()  # inner modules of wrappers, which count as one with them


class _Looks(type):
    """Modules that the policy made units count as wrapped: `isinstance(layer, FullyShardedDataParallel)`."""

    def __instancecheck__(cls, instance: object) -> bool:
        is_base = cls.__dict__.get("__module__") == __name__
        is_unit = is_base and isinstance(instance, FSDPModule) and instance not in _WRAPPED
        return type.__instancecheck__(cls, instance) or is_unit


class FullyShardedDataParallel(nn.Module, metaclass=_Looks):
    """A module whose inner one is sharded in place; names of parameters and state are those of the plain model.

    Arguments are FSDP1's. auto_wrap_policy: one of this file or of torch, or a function (module, recurse,
    nonwrapped_numel) -> bool; tied parameters go to the lowest unit around them. sharding_strategy: HYBRID ones without
    `device_mesh` replicate between nodes of LOCAL_WORLD_SIZE ranks. param_init_fn: called with modules whose parameters
    have memory. Without a context `state_dict()` is full, as in FSDP1.

    Raises `ValueError` for a policy or strategy that is none, `torch.distributed` types that FSDP1 does not take, and
    the errors of `fully_shard`. Source: the signature and documentation of torch 2.13.
    """

    _settings: StateDictSettings

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: Any = None,
        cpu_offload: Any = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: Any = _UNSET,
        mixed_precision: Any = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: Any = _UNSET,
        sync_module_states: bool = False,
        forward_prefetch: Any = _UNSET,
        limit_all_gathers: Any = _UNSET,
        use_orig_params: Any = _UNSET,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        given = (backward_prefetch, forward_prefetch, limit_all_gathers, use_orig_params, device_id)
        for name, value in zip(WITHOUT_EFFECT, given, strict=True):
            if value is not _UNSET:
                notice(name, FSDP1, value)
        for name in ("buffer_dtype", "keep_low_precision_grads"):
            if getattr(mixed_precision, name, None):
                notice(name, MIXED_PRECISION)
        strategy = _name_of(sharding_strategy, ShardingStrategy, "sharding_strategy") or "FULL_SHARD"
        mesh = _mesh(strategy, process_group, device_mesh)
        options = {
            "mesh": mesh,
            "reshard_after_forward": False if strategy in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2") else None,
            "ignored_params": _ignored(ignored_modules, ignored_states) or None,
            "offload_policy": _offload(cpu_offload),
        }
        _shard(module, options, auto_wrap_policy, mixed_precision, sync_module_states)
        if any(parameter.is_meta for parameter in module.parameters()):
            fullshard.materialize(module, init=param_init_fn)
        setattr(self, _INNER, module)
        _WRAPPED.add(module)
        self._settings = StateDictSettings(
            StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig()
        )
        self.register_load_state_dict_pre_hook(self._take_plain_names)  # type: ignore[no-untyped-call]

    # ---- the wrapped module ----------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The sharded module."""
        inner = super().__getattr__(_INNER)
        assert isinstance(inner, nn.Module)
        return inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__(_INNER), name)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # type: ignore[index]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters under their names in the plain model."""
        return ((plain_name(name), parameter) for name, parameter in super().named_parameters(*args, **kwargs))

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yields the buffers under their names in the plain model."""
        return ((plain_name(name), buffer) for name, buffer in super().named_buffers(*args, **kwargs))

    def no_sync(self) -> AbstractContextManager[None]:
        """Gradients of backwards inside are kept and not sent; the first backward after it sends their sum."""
        return _no_sync(self.module)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients to a global norm of at most `max_norm`; returns the norm before."""
        return fullshard.clip_grad_norm_(self.parameters(), max_norm, norm_type)

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """`fn` of every module, with full parameters, whose changes are kept. Collective."""
        with self.summon_full_params(self):
            super().apply(fn)
        return self

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        raise NotImplementedError(
            "register_comm_hook: expected model.set_all_reduce_hook(...) or set_custom_reduce_scatter(...) of "
            "fully_shard, found FSDP1's hook of flat gradients, which do not exist here"
        )

    @staticmethod
    @contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """Full, plain parameters inside, as `fullshard.full_params`."""
        if with_grads:
            raise NotImplementedError(
                "with_grads: expected False, found True; gradients are DTensors: p.grad.full_tensor() has one whole"
            )
        with fullshard.full_params(
            _inner(module), recurse=recurse, writeback=writeback, rank0_only=rank0_only, offload_to_cpu=offload_to_cpu
        ):
            yield

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[nn.Module]:
        """The wrappers and sharded modules at and below `module`; with `root_only` those in no other one."""
        found: list[nn.Module] = [each for each in module.modules() if isinstance(each, FullyShardedDataParallel)]
        if root_only:
            found = [m for m in found if not any(m is not other and m in other.modules() for other in found)]
        return found

    # ---- state dicts -----------------------------------------------------------------------------------------------

    @staticmethod
    def set_state_dict_type(
        module: nn.Module, state_dict_type: Any, state_dict_config: Any = None, optim_state_dict_config: Any = None
    ) -> StateDictSettings:
        """The form of state dicts from now on; returns the one before."""
        kind = _name_of(state_dict_type, StateDictType, "state_dict_type")
        if kind == "LOCAL_STATE_DICT":
            raise NotImplementedError(
                "state_dict_type: expected FULL_STATE_DICT or SHARDED_STATE_DICT, found LOCAL_STATE_DICT, shards of "
                "flat parameters, which nothing here has; sharded ones are read without communication too"
            )
        full = kind == "FULL_STATE_DICT"
        default = (FullStateDictConfig if full else ShardedStateDictConfig)()
        optim = (FullOptimStateDictConfig if full else ShardedOptimStateDictConfig)()
        settings = StateDictSettings(
            StateDictType[str(kind)], state_dict_config or default, optim_state_dict_config or optim
        )
        wrappers = [each for each in module.modules() if _is_wrapper(each)]
        if not wrappers:
            raise ValueError(
                f"module: expected a FullyShardedDataParallel, or one with such in it, found {type(module).__name__}"
            )
        before = FullyShardedDataParallel.get_state_dict_type(module)
        for wrapper in wrappers:
            wrapper._settings = settings  # type: ignore[assignment]
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """The form of state dicts of the first wrapper at or below `module`."""
        default = StateDictSettings(StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig())
        found: Any = next((each for each in module.modules() if _is_wrapper(each)), None)
        settings: StateDictSettings = default if found is None else found._settings
        return settings

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module, state_dict_type: Any, state_dict_config: Any = None, optim_state_dict_config: Any = None
    ) -> Iterator[None]:
        """The form of `state_dict`, `load_state_dict` and `optim_state_dict` inside."""
        wrap = FullyShardedDataParallel
        before = wrap.set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
        try:
            yield
        finally:
            wrap.set_state_dict_type(
                module, before.state_dict_type, before.state_dict_config, before.optim_state_dict_config
            )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the state dict in the form of `state_dict_type`; collective for the full one."""
        own: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        kind, config = self._settings.state_dict_type, self._settings.state_dict_config
        full = kind is StateDictType.FULL_STATE_DICT
        made = in_form(own, full=full, offload_to_cpu=config.offload_to_cpu, keep=_keeps(full, config))
        own.clear()  # the dict itself has the versions of modules
        own.update(made)
        return own

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Whole tensors, the same on all ranks, or sharded ones."""
        here = dict(self.named_parameters(remove_duplicate=False))
        cut = {name: _like(here.get(plain_name(name)), value) for name, value in state_dict.items()}
        return super().load_state_dict(cut, strict, assign)

    def _take_plain_names(self, _: nn.Module, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Names in a state dict are those of the plain model; the inner module is one level further down."""
        for name in [name for name in state_dict if name.startswith(prefix)]:
            if not name.startswith(f"{prefix}{_INNER}."):
                state_dict[f"{prefix}{_INNER}.{name.removeprefix(prefix)}"] = state_dict.pop(name)

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """The optimizer's state under names of parameters, in the form of `state_dict_type`. Collective if full."""
        if optim_state_dict is not None:
            raise NotImplementedError("optim_state_dict: expected None, found a dict; load it into the optimizer first")
        settings = FullyShardedDataParallel.get_state_dict_type(model)
        full, config = settings.state_dict_type is StateDictType.FULL_STATE_DICT, settings.optim_state_dict_config
        return _optimizer_state(model, optim, full, config)

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: Any = None,
        rank0_only: bool = True,
        group: Any = None,
    ) -> dict[str, Any]:
        """`optim_state_dict` with whole tensors in host memory, on rank 0 alone unless set otherwise. Collective."""
        return _optimizer_state(model, optim, True, FullOptimStateDictConfig(rank0_only=rank0_only))

    @staticmethod
    def sharded_optim_state_dict(model: nn.Module, optim: torch.optim.Optimizer, group: Any = None) -> dict[str, Any]:
        """`optim_state_dict` with sharded tensors."""
        return _optimizer_state(model, optim, False, ShardedOptimStateDictConfig())

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """Returns what `optim.load_state_dict` takes, made of a full state that every rank has."""
        if optim is None:
            raise ValueError("optim: expected the optimizer, found None; pass optim=")
        return FullyShardedDataParallel.optim_state_dict_to_load(model, optim, full_optim_state_dict)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: torch.optim.Optimizer
    ) -> dict[str, Any]:
        """The same, of what `sharded_optim_state_dict` returned."""
        return FullyShardedDataParallel.optim_state_dict_to_load(model, optim, sharded_optim_state_dict)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: Any = None,
    ) -> dict[str, Any]:
        """Returns what `optim.load_state_dict` takes, made of what `optim_state_dict` returned: full, the same on all
        ranks."""
        names = {id(parameter): plain_name(name) for name, parameter in _inner(model).named_parameters()}
        owned = [parameter for each in optim.param_groups for parameter in each["params"]]
        numbers = {names[id(parameter)]: number for number, parameter in enumerate(owned)}
        state = {
            numbers[name]: {key: _like_state(owned[numbers[name]], value) for key, value in entries.items()}
            for name, entries in optim_state_dict["state"].items()
        }
        groups = [
            {**each, "params": [numbers[name] for name in each["params"]]} for each in optim_state_dict["param_groups"]
        ]
        made = {"state": state, "param_groups": groups}
        if load_directly:
            optim.load_state_dict(made)
        return made


# ---- arguments -------------------------------------------------------------------------------------------------------


def notice(name: str, rows: Iterable[Any], value: object = None) -> None:
    """Warn, as Python warns, that an argument has no effect, with the reason of the tables of `fullshard migrate`."""
    spelled = f"{name}={getattr(value, 'name', value)}"
    row = next(row for row in rows if row.old in (name, spelled))
    warnings.warn(f"FullyShardedDataParallel: {name} has no effect: {row.reason}", stacklevel=4)


def plain_name(name: str) -> str:
    """`name` without the wrappers in it."""
    return name.replace(f"{_INNER}.", "")


def _optimizer_state(model: nn.Module, optim: torch.optim.Optimizer, full: bool, config: Any) -> dict[str, Any]:
    named = checkpoint.get_state_dict(_inner(model), optim)[1]
    keep = _keeps(full, config)
    state = {
        plain_name(name): in_form(entries, full=full, offload_to_cpu=config.offload_to_cpu, keep=keep)
        for name, entries in named["state"].items()
    }
    groups = [{**each, "params": [plain_name(name) for name in each["params"]]} for each in named["param_groups"]]
    return {"state": state, "param_groups": groups} if keep else {}


def _is_wrapper(module: object) -> bool:
    return issubclass(type(module), FullyShardedDataParallel)


def _keeps(full: bool, config: Any) -> bool:
    """Whether this rank gets the state."""
    return not full or not config.rank0_only or dist.get_rank() == 0


def _inner(module: nn.Module) -> nn.Module:
    return module.module if _is_wrapper(module) else module  # type: ignore[return-value]


def _name_of(value: Any, kind: Any, argument: str) -> str | None:
    """The name of an enum's member, ours or torch's."""
    if value is None:
        return None
    name = getattr(value, "name", None)
    if name not in kind.__members__:
        raise ValueError(f"{argument}: expected one of {', '.join(kind.__members__)}, found {value!r}")
    return str(name)


def _mesh(strategy: str, group: Any, mesh: DeviceMesh | None) -> DeviceMesh:
    if not dist.is_initialized():
        dist.init_process_group()
    accelerator = torch.accelerator.current_accelerator()
    device = accelerator.type if accelerator is not None and torch.accelerator.is_available() else "cpu"
    if mesh is not None:
        return mesh
    if isinstance(group, tuple):
        return _mesh_of_two(group, device)
    if group is not None:
        mesh = DeviceMesh.from_group(group, device)
    world = dist.get_world_size(group)
    if strategy == "NO_SHARD":
        if group is not None:
            raise ValueError("process_group: expected None with NO_SHARD, found a group; pass device_mesh= of (n, 1)")
        return init_device_mesh(device, (world, 1), mesh_dim_names=("replicate", "shard"))
    if strategy in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
        local = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
        if group is not None or not local or world % local:
            raise ValueError(
                f"sharding_strategy: expected device_mesh= of (replicate, shard) with {strategy}, or the ranks of a "
                f"node in LOCAL_WORLD_SIZE, a factor of {world}, found {local or 'none'}"
            )
        return init_device_mesh(device, (world // local, local), mesh_dim_names=("replicate", "shard"))
    return mesh if mesh is not None else init_device_mesh(device, (world,))


def _mesh_of_two(groups: Any, device: str) -> DeviceMesh:
    """Returns the mesh of FSDP1's pair (group that shards, group that replicates), where ranks of the others follow by
    the same steps, as nodes do."""
    shard, replicate = (sorted(dist.get_process_group_ranks(group)) for group in groups)
    ranks = torch.tensor([[rank + other - dist.get_rank() for rank in shard] for other in replicate])
    return DeviceMesh.from_group([groups[1], groups[0]], device, ranks, mesh_dim_names=("replicate", "shard"))


def _ignored(modules: Iterable[nn.Module] | None, states: Iterable[Any] | None) -> set[nn.Parameter]:
    found: set[nn.Parameter] = set()
    for each in (*(modules or ()), *(states or ())):
        found |= {*each.parameters()} if isinstance(each, nn.Module) else {each}
    return found


def _shard(module: nn.Module, options: dict[str, Any], policy: Any, precision: Any, sync: bool) -> None:
    """Shard what the policy chooses in `module`, and then `module`."""
    tree = Tree(module)
    chosen = _chosen(module, policy)
    full = _kept_in_full(module, precision) if policy is not None else set()  # as FSDP1 does
    plans = [UnitPlan((tree.names[each],), "policy", given) for each, given in chosen.items()]
    plans += [UnitPlan((tree.names[each],), "precision") for each in full - {*chosen}]
    plans = [plan for plan in plans if tree.can_be_unit(plan.modules[0])]
    units, _ = resolve_ties(tree, plans, "lowest_common")
    ordered = [*inner_first(tree, units), UnitPlan(("",), "root")]
    made = {tree.modules[plan.modules[0]] for plan in ordered}
    for plan in ordered:
        unit = tree.modules[plan.modules[0]]
        if isinstance(unit, FSDPModule):
            continue
        if sync:
            done = {each for each in module.modules() if isinstance(each, FSDPModule)}
            send_values(tree, plan.modules, options["mesh"], (made | done) - {unit})
        given = {**options, "mp_policy": _policy(precision), **_of_unit(plan.arguments)}
        if unit in full:
            given["mp_policy"] = _policy(precision, full=True)
        fully_shard(unit, **given)


def _of_unit(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that a policy gives for one unit, FSDP1's or those of `fully_shard`."""
    made = {name: value for name, value in given.items() if name not in (*WITHOUT_EFFECT, *_OF_UNITS)}
    if "mixed_precision" in given:
        made["mp_policy"] = _policy(given["mixed_precision"])
    if "cpu_offload" in given:
        made["offload_policy"] = _offload(given["cpu_offload"])
    if "sharding_strategy" in given:
        name = _name_of(given["sharding_strategy"], ShardingStrategy, "sharding_strategy")
        if name not in ("FULL_SHARD", "SHARD_GRAD_OP"):
            raise ValueError(f"sharding_strategy of a unit: expected FULL_SHARD or SHARD_GRAD_OP, found {name}")
        made["reshard_after_forward"] = name == "FULL_SHARD"
    return made


def _offload(given: Any) -> fullshard.OffloadPolicy:
    wanted = getattr(given, "offload_params", False)
    return fullshard.CPUOffloadPolicy() if wanted else fullshard.OffloadPolicy()


def _policy(precision: Any, *, full: bool = False) -> fullshard.MixedPrecisionPolicy:
    if precision is None:
        return fullshard.MixedPrecisionPolicy()
    compute = precision.param_dtype
    # FSDP1 reduces in the dtype of compute, FSDP2 from torch 2.15 on in that of the parameters.
    reduce = compute if precision.reduce_dtype is None else precision.reduce_dtype
    if full:  # FSDP1 casts inputs of these to float32, and their outputs back
        return fullshard.MixedPrecisionPolicy(torch.float32, torch.float32, compute)
    cast = precision.cast_forward_inputs or precision.cast_root_forward_inputs
    return fullshard.MixedPrecisionPolicy(compute, reduce, None, cast)


def _kept_in_full(module: nn.Module, precision: Any) -> set[nn.Module]:
    """Modules of the classes that mixed precision leaves out (BatchNorm), with parameters."""
    if precision is None or precision.param_dtype is None:
        return set()
    classes = tuple(getattr(precision, "_module_classes_to_ignore", ()))
    found = {each for each in module.modules() if isinstance(each, classes) and each is not module}
    return {each for each in found if next(each.parameters(), None) is not None}


def _chosen(module: nn.Module, policy: Any) -> dict[nn.Module, dict[str, Any]]:
    """The modules that `policy` makes units, with arguments of their own."""
    if policy is None:
        return {}
    if isinstance(policy, CustomPolicy):
        return policy.chosen(module)
    if not callable(policy):
        raise ValueError(f"auto_wrap_policy: expected a policy or a function, found {policy!r}")
    found: dict[nn.Module, dict[str, Any]] = {}

    def walk(each: nn.Module) -> int:
        """Elements below `each` that are in units."""
        numel = sum(parameter.numel() for parameter in each.parameters())
        if isinstance(each, FSDPModule):
            return numel
        if not policy(module=each, recurse=True, nonwrapped_numel=numel):
            return 0
        wrapped = sum(walk(child) for child in each.children())
        left = numel - wrapped
        if each is not module and left and policy(module=each, recurse=False, nonwrapped_numel=left):
            found[each] = {}
            return numel
        return wrapped

    walk(module)
    return found


@contextmanager
def _no_sync(module: nn.Module) -> Iterator[None]:
    assert isinstance(module, FSDPModule)
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)


def _like(here: Any, given: Any) -> Any:
    """`given`, cut as `here` is, if it is whole."""
    if isinstance(here, DTensor) and isinstance(given, Tensor) and not isinstance(given, DTensor):
        return torch.distributed.tensor.distribute_tensor(
            given.to(here.device), here.device_mesh, here.placements, src_data_rank=None
        )
    return given


def _like_state(parameter: Tensor, value: Any) -> Any:
    return _like(parameter, value) if isinstance(value, Tensor) and value.shape == parameter.shape else value
