"""What `fully_shard` refuses, and whatever raises inside it, leaves the modules exactly as they were."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fullshard
from fullshard import MixedPrecisionPolicy, fully_shard, replicate
from tests.harness.fake import fake_world


def _model() -> Any:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4, bias=False))
    model[0].weight.mark = "mine"
    model[0].register_forward_hook(lambda *_: None)
    model[0].weight.register_hook(lambda gradient: gradient)
    return model


def _state(model: nn.Module) -> list[Any]:
    """Everything that a call may have changed: by identity, but for the contents of registries."""
    found: list[Any] = []
    for name, module in model.named_modules():
        found += [name, type(module), {key: id(value) for key, value in vars(module).items()}]
        found += [list(value.items()) for value in vars(module).values() if isinstance(value, dict)]
    for parameter in model.parameters():
        found += [id(parameter), type(parameter), dict(vars(parameter)), parameter.data_ptr(), parameter._version]
        found += [parameter.requires_grad, id(parameter.grad), parameter._backward_hooks]
    return found


# ---- refusals ------------------------------------------------------------------------------------------------


class Refused(NamedTuple):
    error: type[Exception]
    says: str
    call: Callable[[Any], object]
    make: Callable[[], Any] = _model


def _scripted() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        return torch.jit.script(nn.Linear(4, 4))


def _over_one_memory() -> Any:
    model = _model()
    model.append(nn.Linear(4, 6))
    model[3].weight = nn.Parameter(model[0].weight.data)
    return model


def _overlapping() -> Any:
    model, memory = _model(), torch.zeros(30)
    model[0].weight = nn.Parameter(memory[:24].view(6, 4))
    model[2].weight = nn.Parameter(memory[6:].view(4, 6), requires_grad=False)
    return model


class Unswappable(nn.Linear):
    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":
            raise TypeError("no other class")
        super().__setattr__(name, value)


class Final(nn.Linear):
    def __init_subclass__(cls) -> None:
        raise TypeError("no subclasses")


def _strided() -> Any:
    model = _model()
    model[2].weight = nn.Parameter(torch.zeros(6, 4).t())
    return model


def _scalar() -> Any:
    model = _model()
    model.scale = nn.Parameter(torch.tensor(1.0))
    return model


def _tied_to_a_unit() -> Any:
    model = nn.Sequential(_model(), nn.Linear(4, 6))
    model[1].weight = model[0][0].weight
    fully_shard(model[1])
    return model


def _memory_of_a_unit() -> Any:
    model = nn.Sequential(_over_one_memory())
    fully_shard(model[0][3])
    return model


def _units_over_one_memory() -> Any:
    """Neither is inside the other: the module around them is the first that could know."""
    model = _over_one_memory()
    fully_shard(model[0])
    fully_shard(model[3])
    return model


def _late() -> Any:
    model = _model()
    fully_shard(model[0])
    model[0].unshard()
    return model


def _mesh(*shape: int, names: tuple[str, ...] | None = None) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _second_raises() -> Callable[[nn.Parameter], None]:
    calls: list[nn.Parameter] = []

    def place(parameter: nn.Parameter) -> None:
        calls.append(parameter)
        if len(calls) > 1:
            raise KeyError("a user's function")

    return place


REFUSED: dict[str, Refused] = {
    "a ScriptModule": Refused(RuntimeError, "module: expected modules of Python", fully_shard, _scripted),
    "a ScriptModule inside": Refused(
        RuntimeError, "found 1 below Sequential", fully_shard, lambda: nn.Sequential(nn.Linear(4, 4), _scripted())
    ),
    "one memory": Refused(ValueError, "0.weight and 3.weight: expected", fully_shard, _over_one_memory),
    "overlapping memory": Refused(ValueError, "0.weight and 2.weight: expected", fully_shard, _overlapping),
    "the memory of a unit": Refused(
        ValueError, r"weight \(of the unit Linear\)", fully_shard, _memory_of_a_unit
    ),
    "two units over one memory": Refused(
        ValueError, "two parameters over the same memory", fully_shard, _units_over_one_memory
    ),
    "a class that stays": Refused(TypeError, "Unswappable.*no other class", fully_shard, lambda: Unswappable(4, 4)),
    "a final class": Refused(TypeError, "Final.*no subclasses", fully_shard, lambda: Final(4, 4)),
    "strides": Refused(NotImplementedError, "2.weight: expected a contiguous", fully_shard, _strided),
    "a scalar": Refused(ValueError, "scale: expected", fully_shard, _scalar),
    "tied to a unit": Refused(ValueError, "0.0.weight: expected each", fully_shard, _tied_to_a_unit),
    "twice": Refused(AssertionError, "module: expected", lambda m: fully_shard(m[0]), _late),
    "after an unshard": Refused(RuntimeError, "module: expected parts that did not run", fully_shard, _late),
    "averaged by DDP": Refused(
        RuntimeError, "module: expected parameters whose", fully_shard, lambda: DistributedDataParallel(nn.Linear(4, 4))
    ),
    "an empty list": Refused(ValueError, "module: expected at least one", lambda m: fully_shard([])),
    "twice in a list": Refused(AssertionError, "module: expected each", lambda m: fully_shard([m[0], m[0]])),
    "half a list": Refused(
        RuntimeError,
        "module: expected modules of Python",
        lambda m: fully_shard([m[0], m[1]]),
        lambda: nn.Sequential(nn.Linear(4, 4), _scripted()),
    ),
    "a list without forward": Refused(
        ValueError, "module: expected one with a forward", fully_shard, lambda: nn.ModuleList([_model()])
    ),
    "a mesh of three axes": Refused(ValueError, "mesh: expected 1 axis", lambda m: fully_shard(m, mesh=_mesh(2, 2, 1))),
    "axes without names": Refused(AssertionError, "mesh: expected names", lambda m: fully_shard(m, mesh=_mesh(2, 2))),
    "a degree": Refused(ValueError, "reshard_after_forward: ", lambda m: fully_shard(m, reshard_after_forward=3)),
    "a placement": Refused(
        AssertionError, "shard_placement_fn: ", lambda m: fully_shard(m, shard_placement_fn=lambda p: Shard(5))
    ),
    "a placement function": Refused(
        KeyError, "a user's function", lambda m: fully_shard(m, shard_placement_fn=_second_raises())
    ),
    "a policy": Refused(
        ValueError, "mp_policy.param_dtype", lambda m: fully_shard(m, mp_policy=MixedPrecisionPolicy(torch.int8))
    ),
    "an offload policy": Refused(TypeError, "offload_policy: ", lambda m: fully_shard(m, offload_policy=3)),
    "ignored parameters": Refused(TypeError, "ignored_params: ", lambda m: fully_shard(m, ignored_params=m[0].weight)),
    "axes": Refused(
        ValueError,
        "dp_mesh_dims.shard",
        lambda m: fully_shard(
            m,
            mesh=_mesh(2, 2, names=("a", "b")),
            dp_mesh_dims=fullshard.DataParallelMeshDims(shard="c", replicate=None),
        ),
    ),
    "replicate over two axes": Refused(ValueError, "mesh: expected one axis", lambda m: replicate(m, mesh=_mesh(2, 2))),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_module_is_whole(name: str) -> None:
    refused = REFUSED[name]
    with fake_world(4):
        model = refused.make()
        before = _state(model)
        with pytest.raises(refused.error, match=refused.says):
            refused.call(model)
        assert _state(model) == before


# ---- whatever raises -----------------------------------------------------------------------------------------

STEPS = (
    "mesh_links move_unsharded Unit ignored_names own_parameters UnitHooks hook_state_dict publish sharded_class "
    "note_managed validate.refuse_parallelism"
).split()


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("several", [False, True])
def test_an_error_at_any_step_leaves_the_modules_whole(step: str, several: bool, monkeypatch: Any) -> None:
    """After the step did what it does; and the same call works afterwards."""
    with fake_world(4):
        model = _model()
        before = _state(model)
        module = [model[0], model[2]] if several else model
        place = fully_shard.__globals__
        if "." in step:
            module_name, _, step = step.partition(".")
            place = vars(place[module_name])
        original, calls = place[step], []

        def fails(*args: Any, **kwargs: Any) -> Any:
            original(*args, **kwargs)
            calls.append(step)
            raise MemoryError(step)

        with monkeypatch.context() as patched:
            patched.setitem(place, step, fails)
            with pytest.raises((MemoryError, TypeError), match=step):
                fully_shard(module)
        assert calls
        assert _state(model) == before
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.step()  # nothing noted that its parameters were replaced
        fully_shard(module)
        assert isinstance(model[0] if several else model, fullshard.FSDPModule)


# ---- memory --------------------------------------------------------------------------------------------------


def test_what_only_looks_alike_is_taken() -> None:
    """Parameters side by side in one memory, frozen ones over one memory, and a model over the memory of another."""
    with fake_world(2):
        memory = torch.zeros(48)
        model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False))
        model[0].weight = nn.Parameter(memory[:24].view(6, 4))
        model[1].weight = nn.Parameter(memory[24:].view(4, 6))
        other = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(4, 6, bias=False)).requires_grad_(False)
        for layer in other:
            layer.weight = nn.Parameter(memory[:24].view(6, 4), requires_grad=False)
        for each in (model, other):
            for layer in each:
                fully_shard(layer)
            fully_shard(each)


def test_the_memory_is_not_kept() -> None:
    with fake_world(2):
        layer = nn.Linear(4, 4)
        held = weakref.ref(layer.weight)
        fully_shard(layer)
        gc.collect()
        assert held() is None


def test_a_gradient_from_before_is_dropped_with_a_warning() -> None:
    with fake_world(2):
        model = _model()
        model(torch.ones(3, 4)).sum().backward()
        with pytest.warns(UserWarning, match=r"found .grad from before") as caught:
            fully_shard(model)
        assert caught[0].filename == __file__
        assert all(p.grad is None for p in model.parameters())
        # Python shows equal texts from one place once.
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("default")
            for _ in range(3):
                again = _model()
                again(torch.ones(3, 4)).sum().backward()
                fully_shard(again)
        assert len(shown) == 1


# ---- tensor parallelism afterwards ---------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.mlp(x)
        return y


@pytest.mark.parametrize("plan", [{"mlp.0": ColwiseParallel()}, {"mlp.2": RowwiseParallel()}, None])
@pytest.mark.parametrize("axes", ["another", "the same"])
def test_tensor_parallelism_after_sharding_names_the_order(plan: Any, axes: str) -> None:
    """torch says "Cannot distribute a DTensor" without a name, or cuts a parameter on the same mesh a second time."""
    with fake_world(4):
        mesh = _mesh(2, 2, names=("dp", "tp")) if axes == "another" else _mesh(4)
        block = Block()
        fully_shard(block, mesh=mesh["dp"] if axes == "another" else mesh)
        with pytest.raises(ValueError, match=r"parallelize_module: expected tensor parallelism before fully_shard"):
            if plan is None:
                distribute_module(block, mesh["tp"] if axes == "another" else mesh)
            parallelize_module(block, mesh["tp"] if axes == "another" else mesh, plan)
        with pytest.raises(ValueError, match=r"of mlp.0 \(Linear\) belong to the unit Block"):
            parallelize_module(block.mlp[0], mesh["tp"] if axes == "another" else mesh, ColwiseParallel())


def test_tensor_parallelism_where_nothing_is_cut() -> None:
    """Before sharding; for modules without parameters of a unit; and for inputs alone."""
    with fake_world(4):
        mesh = _mesh(2, 2, names=("dp", "tp"))
        block = Block()
        parallelize_module(block, mesh["tp"], {"mlp.0": ColwiseParallel()})
        ignored = set(block.mlp[2].parameters())
        fully_shard(block, mesh=mesh["dp"], ignored_params=ignored)
        parallelize_module(block, mesh["tp"], {"mlp.2": RowwiseParallel()})
        parallelize_module(block, mesh["tp"], PrepareModuleInput(input_layouts=None, desired_input_layouts=None))


# ---- parameters without dims -----------------------------------------------------------------------------------------


def _scalar(**options: Any) -> nn.Parameter:
    return nn.Parameter(torch.tensor(2.6592, **options))


def _with_scale(at: str, scale: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    model.get_submodule(at).register_parameter("scale", scale)
    return model


def _in_a_dict() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4))
    model.add_module("scales", nn.ParameterDict({"text": _scalar(), "image": torch.ones(1)}))
    return model


def _tied() -> nn.Module:
    model = _with_scale("0", _scalar())
    model[1].scale = model[0].scale
    return model


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda: _with_scale("", _scalar()), "scale"),
        (lambda: _with_scale("1.0", _scalar()), "1.0.scale"),
        (lambda: _with_scale("0", _scalar(dtype=torch.bfloat16)), "0.scale"),
        (lambda: _with_scale("0", _scalar(device="meta")), "0.scale"),
        (lambda: _with_scale("0", nn.Parameter(torch.tensor(1.0), requires_grad=False)), "0.scale"),
        (_in_a_dict, "scales.text"),
        (_tied, "0.scale"),
    ],
    ids=["the root's", "of a block of a block", "bfloat16", "meta", "frozen", "in a dict", "tied"],
)
def test_a_parameter_without_dims_is_named_with_what_keeps_it_whole(build: Any, name: str) -> None:
    """And what the text says works: it is left out of the unit, and everything else is sharded."""
    with fake_world(2):
        model = build()
        with pytest.raises(ValueError, match=rf"{name}: .*found a scalar[\s\S]*ignored_params"):
            fully_shard(model)
        fully_shard(model, ignored_params={model.get_parameter(name)})
        assert [n for n, p in model.named_parameters() if not hasattr(p, "device_mesh")] == [name]
