"""Every public function and method, every argument, with values of every wrong kind: an error that names the argument,
and nothing has changed. What is taken is listed."""

from __future__ import annotations

import contextlib
import inspect
import math
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
import fullshard.checkpoint as checkpoint
import fullshard.observe as observe
from tests.harness.fake import fake_world

ERRORS = (TypeError, ValueError, RuntimeError, AssertionError, checkpoint.CheckpointError)  # NotImplementedError too


def _kinds() -> dict[str, Any]:
    return {
        "None": None,
        "True": True,
        "3": 3,
        "-1": -1,
        "1.5": 1.5,
        "nan": math.nan,
        "text": "wrong",
        "list": [],
        "[1]": [1],
        "dict": {},
        "object": object(),
        "function": lambda *_: None,
        "class": nn.Linear,
        "module": nn.Linear(2, 2),  # not sharded
        "modules": [nn.Linear(2, 2)],
        "tensor": torch.ones(2),
    }


class Given:
    """What valid calls are made of."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for module in (*self.model, self.model):
            fullshard.fully_shard(module)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p)
        self.plain = nn.Linear(4, 4)
        self.folder = folder
        self.saved = folder / "step-1"
        if not self.saved.exists():
            checkpoint.save({"a": torch.ones(2)}, checkpoint_id=self.saved, no_dist=True)

    def state(self) -> list[Any]:
        """What a refused call may not have changed."""
        found: list[Any] = [sorted(path.name for path in self.folder.iterdir())]
        for module in (*self.model.modules(), self.plain):
            found += [
                type(module),
                sorted(vars(module)),
                [(len(v), k) for k, v in vars(module).items() if type(v) is dict],
            ]
            unit = vars(module).get("_fullshard_unit")
            if unit is not None:
                found += [repr(unit.settings), repr(unit.record.plan), unit.record.full, unit.opened]
        for p in (*self.model.parameters(), *self.plain.parameters()):
            found += [id(p), p._version, id(p.grad), -1 if p.grad is None else p.grad._version]
        for group in self.optimizer.param_groups:
            found += [{key: value for key, value in group.items() if key != "params"}, list(map(id, group["params"]))]
        return found


class Comm:
    def __call__(self, *_: Any, **__: Any) -> None: ...

    def allocate(self, *_: Any, **__: Any) -> None: ...


class Argument(NamedTuple):
    """`valid`: the value for the calls that vary another argument. `taken`: kinds that are legal, or the caller's own
    error. `called`: how errors call it, by default by its name."""

    valid: Callable[[Given], Any]
    taken: str = ""
    called: str = ""


def _is(value: Any, taken: str = "", called: str = "") -> Argument:
    return Argument(lambda _: value, taken, called)


FLAG = _is(True, "True")
MAYBE = _is(None, "None")
MODEL = Argument(lambda given: given.model)
BYTES = "None 3"
CALLABLE = "None function class module"
STATE = Argument(lambda _: {"a": torch.ones(2)}, "dict")
FOLDER = Argument(lambda given: given.saved, "text")
DIGEST = _is(None, "None text")
POLICIES = {
    "mesh": MAYBE,
    "mp_policy": _is(fullshard.MixedPrecisionPolicy()),
    "offload_policy": _is(fullshard.OffloadPolicy()),
    "ignored_params": _is(None, "None list"),
    "dp_mesh_dims": MAYBE,
}
SAVING = {
    "state_dict": STATE,
    "checkpoint_id": Argument(lambda given: given.folder / "step-2", "text"),
    "process_group": MAYBE,
    "no_dist": FLAG,
    "take_first": _is((), "list"),
    "metrics": _is(None, "None dict"),
    "base": _is(None, "None text"),
    "progress": _is(None, CALLABLE),
}
# Of a save to a directory, where it is None.
ASYNC = {"staging_nbytes": _is(None, BYTES), "queue": _is(False, "True"), "local": _is(None, "None")}


def _enter(context: Any) -> None:
    with context:
        pass


def _first(iterator: Iterator[Any]) -> None:
    for _ in iterator:
        break


Call = tuple[Callable[..., Any], dict[str, Argument]]
FUNCTIONS: dict[str, Call] = {
    "fully_shard": (
        fullshard.fully_shard,
        {
            "module": Argument(lambda given: given.plain, "module modules"),
            "reshard_after_forward": _is(True, "None True"),
            "shard_placement_fn": _is(None, CALLABLE),
            "optional": _is(False, "True"),
            **POLICIES,
        },
    ),
    "replicate": (fullshard.replicate, {"module": Argument(lambda given: given.plain, "module modules"), **POLICIES}),
    "average": (
        fullshard.average,
        {
            "model": MODEL._replace(taken="module"),
            "decay": _is(0.9),
            "window": _is(None, "None"),
            "device": _is(None, "None"),
            "buffers": FLAG,
        },
    ),
    "sleep": (
        fullshard.sleep,
        {
            "model": MODEL,
            "optimizer": Argument(lambda given: given.optimizer, "None list"),
            "average": MAYBE,
            "drop": _is(False, "True text"),
        },
    ),
    "wake": (fullshard.wake, {"model": MODEL._replace(taken="module"), "load": _is(None, CALLABLE)}),
    "context_parallel": (
        fullshard.context_parallel,
        {
            "mesh": Argument(lambda _: init_device_mesh("cpu", (2,))),
            "buffers": _is(None, "None list"),
            "buffer_seq_dims": _is(None, "None list"),
            "no_restore_buffers": _is(None, "None list"),
            "variant": _is("auto"),
            "load_balance": FLAG,
        },
    ),
    "step_on_owners": (
        fullshard.step_on_owners,
        {
            "optimizers": Argument(lambda given: torch.optim.Muon([linear.weight for linear in given.model])),
            "model": Argument(lambda given: given.model, "None module"),
            "on_shards": _is(None, f"list {CALLABLE}"),
            "stacks": _is(None, f"list {CALLABLE}"),
            "cost": _is(None, CALLABLE),
            "chunk_nbytes": _is(1 << 20, "3"),
        },
    ),
    "weights": (
        fullshard.weights,
        {
            "model": MODEL._replace(taken="module"),
            "names": _is(None, f"dict {CALLABLE}"),
            "dtype": _is(None, "None"),
            "bucket_nbytes": _is(1 << 20, "3"),
        },
    ),
    "transfer": (
        fullshard.transfer,
        {
            "source": MODEL,
            "target": MODEL,
            "names": _is(None, f"dict {CALLABLE}"),
            "dtype": _is(None, "None"),
            "limit_nbytes": _is(1 << 20),
            "process_group": MAYBE,
        },
    ),
    "check_gradients": (
        fullshard.check_gradients,
        {
            "model": MODEL._replace(taken="list module tensor"),
            "loss": _is(None, "None True 3 -1 1.5 nan tensor"),
            "on_nonfinite": _is("raise"),
            "process_group": MAYBE,
        },
    ),
    "check_invariants": (fullshard.check_invariants, {"model": MODEL._replace(taken="module"), "every": _is(1, "3")}),
    "checkpoint_activations": (
        fullshard.checkpoint_activations,
        {
            "model": MODEL._replace(taken="module"),
            "at": _is("children"),
            "classes": _is((), "list"),
            "where": _is(None, CALLABLE),
            "every": _is(1, "3"),
            "recompute": FLAG,
            "save": _is((), "list"),
            "offload": FLAG,
        },
    ),
    "clip_grad_norm_": (
        fullshard.clip_grad_norm_,
        {
            "parameters": Argument(lambda given: list(given.model.parameters()), "list tensor"),
            "max_norm": _is(1.0, "3 1.5"),
            "norm_type": _is(2.0, "3 1.5"),
            "error_if_nonfinite": FLAG,
            "foreach": _is(None, "None True"),
            "groups": _is((), "None list"),
        },
    ),
    "grad_stats": (fullshard.grad_stats, {"model": MODEL._replace(taken="module"), "groups": _is((), "None list")}),
    "find_drift": (fullshard.find_drift, {"model": MODEL}),
    "full_params": (
        lambda **given: _enter(fullshard.full_params(**given)),
        {
            "model": MODEL._replace(taken="module"),
            "recurse": FLAG,
            "writeback": _is(False, "True"),
            "rank0_only": _is(False, "True"),
            "offload_to_cpu": FLAG,
        },
    ),
    "unit_open": (lambda **given: _enter(fullshard.unit_open(**given)), {"module": MODEL._replace(taken="module")}),
    "original_classes": (
        lambda **given: _enter(fullshard.original_classes(**given)),
        {"model": MODEL._replace(taken="module")},
    ),
    "guard": (
        lambda guarded, wait: _enter(fullshard.guard(guarded, wait=wait)),
        {"guarded": MODEL, "wait": FLAG},
    ),
    "joined": (
        lambda **given: _first(fullshard.joined(**given)),
        {
            "model": MODEL,
            "batches": _is([1], "text list [1] dict modules tensor"),
            "filler": _is(1, " ".join(_kinds())),
        },
    ),
    "load_pretrained": (
        fullshard.load_pretrained,
        {
            "model": MODEL._replace(taken="module"),
            "path": FOLDER,
            "allow_missing": _is((), "list"),
            "allow_unexpected": _is((), "list"),
            "init": _is(None, CALLABLE),
            "seed": _is(0, "3 -1"),
            "progress": FLAG,
            "process_group": MAYBE,
        },
    ),
    "mark_initialized": (fullshard.mark_initialized, {"module": MODEL}),
    "mark_restored": (fullshard.mark_restored, {"model": MODEL, "source": _is("", "text")}),
    "materialize": (
        fullshard.materialize,
        {
            "model": MODEL._replace(taken="module"),
            "device": MAYBE,
            "init": _is(None, CALLABLE),
            "seed": _is(None, "None 3 -1"),
        },
    ),
    "balance_loss": (fullshard.balance_loss, {"model": Argument(lambda given: given.plain, "module")}),
    "prepare_fully_shard": (
        fullshard.prepare_fully_shard,
        {
            "model": Argument(lambda given: given.plain, "module"),
            "optimizer": _is(None, "None list"),
            "config": _is({"wrap": "none"}, "None dict text"),
            "mesh": MAYBE,
            "parallelism": _is(None, "None dict"),
            "wrap_fn": _is(None, CALLABLE),
            "loss_fn": _is(None, CALLABLE),
            "init": _is(None, CALLABLE),
            "cast_fn": _is(None, CALLABLE),
            "show": FLAG,
        },
    ),
    "rebind_optimizer": (
        fullshard.rebind_optimizer,
        {"optimizer": Argument(lambda given: given.optimizer), "model": MODEL},
    ),
    "register_fsdp_forward_method": (
        fullshard.register_fsdp_forward_method,
        {"module": MODEL._replace(taken="module"), "method_name": _is("forward")},
    ),
    "replay": (
        fullshard.replay,
        {
            "step": _is(lambda: None, "function class module"),
            "model": MODEL._replace(taken="module"),
            "optimizers": _is((), "list"),
            "stateful": _is((), "list modules"),
            "on_difference": _is("raise"),
            "process_group": MAYBE,
        },
    ),
    "report": (
        fullshard.report,
        {"model": MODEL, "optimizer": Argument(lambda given: given.optimizer, "None")},
    ),
    "inspect_units": (fullshard.observe.inspect_units, {"model": MODEL._replace(taken="module")}),
    "share_comm_ctx": (fullshard.share_comm_ctx, {"modules": Argument(lambda given: [given.model], "list")}),
    "step_in_backward": (
        fullshard.step_in_backward,
        {"model": MODEL, "optimizer": Argument(lambda given: given.optimizer), "elementwise": _is(False, "True")},
    ),
    "step_on_shards": (
        fullshard.step_on_shards,
        {"optimizer": Argument(lambda given: given.optimizer), "elementwise": _is(False, "True")},
    ),
    "sync_module_states": (
        fullshard.sync_module_states,
        {
            "model": Argument(lambda given: given.plain, "module"),
            "mesh": MAYBE,
            "from_rank": _is(0),
            "buffers_only": FLAG,
        },
    ),
    "MicroBatches": (
        fullshard.MicroBatches,
        {"model": MODEL, "size": _is(None, BYTES), "search": _is("bisect"), "reduce": _is("last")},
    ),
    "checkpoint.save": (checkpoint.save, SAVING),
    "checkpoint.async_save": (lambda **given: checkpoint.async_save(**given).result(), SAVING | ASYNC),
    "checkpoint.wait": (checkpoint.wait, {"process_group": MAYBE, "no_dist": FLAG}),
    "checkpoint.load": (
        checkpoint.load,
        {
            "state_dict": STATE,
            "checkpoint_id": FOLDER,
            "process_group": MAYBE,
            "no_dist": FLAG,
            "cast": _is(False, "True"),
            "allow_missing": _is((), "list"),
            "allow_unexpected": _is((), "list"),
            "on_some_ranks": _is((), "list"),
            "rename": _is(None, f"{CALLABLE} dict"),
            "manifest_sha256": DIGEST,
            "progress": _is(None, CALLABLE),
        },
    ),
    "checkpoint.derived_seed": (
        checkpoint.derived_seed,
        {"seed": _is(0, "3 -1"), "step": _is(0, "3 -1"), "rank": _is(0, "3 -1"), "purpose": _is("", "text")},
    ),
    "checkpoint.get_state_dict": (
        checkpoint.get_state_dict,
        {
            "model": MODEL._replace(taken="module"),
            "optimizers": Argument(lambda given: given.optimizer, "list"),
        },
    ),
    "checkpoint.set_state_dict": (
        checkpoint.set_state_dict,
        {
            "model": MODEL._replace(taken="module"),
            "optimizers": _is((), "list"),
            "model_state_dict": _is(None, "None dict"),
            "optim_state_dict": MAYBE,
            "allow_missing": _is((), "list"),
            "allow_unexpected": _is((), "list"),
        },
    ),
    "checkpoint.inspect": (checkpoint.inspect, {"checkpoint_id": FOLDER, "manifest_sha256": DIGEST}),
    "checkpoint.verify": (checkpoint.verify, {"checkpoint_id": FOLDER, "manifest_sha256": DIGEST}),
    "checkpoint.open_checkpoint": (
        lambda **given: _enter(checkpoint.open_checkpoint(**given)),
        {"checkpoint_id": FOLDER, "manifest_sha256": DIGEST},
    ),
    "checkpoint.set_aside": (checkpoint.set_aside, {"checkpoint_id": FOLDER}),
    "checkpoint.is_complete": (checkpoint.is_complete, {"checkpoint_id": FOLDER}),
    "checkpoint.recover": (
        checkpoint.recover,
        {
            "folder": Argument(lambda given: given.folder, "text"),
            "local": _is(None, "None"),
            "process_group": MAYBE,
            "no_dist": FLAG,
        },
    ),
    "checkpoint.latest": (checkpoint.latest, {"folder": Argument(lambda given: given.folder, "text")}),
    "checkpoint.retain": (
        checkpoint.retain,
        {
            "folder": Argument(lambda given: given.folder, "text"),
            "keep_last": _is(1, "3"),
            "keep_every": _is(None, BYTES),
            "keep_best": MAYBE,
            "metric": MAYBE,
            "mode": _is("min"),
            "dry_run": FLAG,
            "process_group": MAYBE,
            "no_dist": FLAG,
        },
    ),
    "checkpoint.list_checkpoints": (
        checkpoint.list_checkpoints,
        {"folder": Argument(lambda given: given.folder, "text")},
    ),
    "checkpoint.RandomState": (checkpoint.RandomState, {"seed": _is(0, "3 -1"), "rank": _is(None, BYTES)}),
    "observe.first_and_every": (observe.first_and_every, {"first": _is(0, "3"), "every": _is(0, "3")}),
    "observe.record": (lambda model: _enter(observe.record(model)), {"model": MODEL}),
}
# Of the model; those of other classes have their object in front.
METHODS: dict[str, dict[str, Argument]] = {
    "finalize_backward": {"async_op": _is(False, "True")},
    "set_all_reduce_hook": {"hook": _is(None, CALLABLE), "stream": MAYBE},
    "set_allocate_memory_from_process_group_for_comm": {"enable": FLAG},
    "set_communication": {"strategy": _is("auto"), "recurse": FLAG},
    "set_custom_all_gather": {"comm": _is(Comm(), "None")},
    "set_custom_reduce_scatter": {"comm": _is(Comm(), "None")},
    "set_force_sum_reduction_for_comms": {"enable": FLAG},
    "set_gradient_divide_factor": {"factor": _is(1.0, "None 3 1.5")},
    "set_reduce_scatter_divide_factor": {"factor": _is(1.0, "None 3 1.5")},
    "set_keep_unsharded_storage": {"keep": FLAG, "recurse": FLAG},
    "set_manual_backward_finalization": {"enabled": FLAG},
    "set_memory_budget": {name: _is(1, BYTES) for name in ("prefetch", "gradients", "resident")},
    "set_is_last_backward": {"is_last_backward": FLAG},
    "set_modules_to_backward_prefetch": {"modules": Argument(lambda given: [given.model[0]], "list")},
    "set_modules_to_forward_prefetch": {"modules": Argument(lambda given: [given.model[0]], "list")},
    "set_post_optim_event": {"event": MAYBE},
    "set_reduce_scatter_max_input_buffers": {"max_input_buffers": _is(1, "3"), "recurse": FLAG},
    "set_reduce_scatter_unused_params": {"reduce_scatter_unused_params": FLAG, "recurse": FLAG},
    "set_requires_all_reduce": {"requires_all_reduce": FLAG, "recurse": FLAG},
    "set_requires_gradient_sync": {"requires_gradient_sync": FLAG, "recurse": FLAG},
    "set_reshard_after_backward": {"reshard_after_backward": FLAG, "recurse": FLAG},
    "set_reshard_after_forward": {"reshard_after_forward": FLAG, "recurse": FLAG},
    "set_separate_reduce_scatter_group": {"enable": FLAG, "recurse": FLAG},
    "set_symm_mem_for_comm": {"backend": _is("NCCL")},
    "set_unshard_in_backward": {"unshard_in_backward": FLAG},
    "unshard": {"async_op": _is(False, "True")},
    "zero_grad": {"set_to_none": FLAG},
}
OBJECTS: dict[str, Call] = {
    "MicroBatches.backward": (
        lambda given, **kwargs: fullshard.MicroBatches(given.model).backward(**kwargs),
        {
            "loss_of": Argument(lambda given: lambda _: given.model(torch.ones(2, 4)).sum(), "class module"),
            "samples": _is(4, "3"),
            "tokens": _is(None, "None 3"),
            "filler": _is(None, CALLABLE),
        },
    ),
    "MicroBatches.load_state_dict": (
        lambda given, state: fullshard.MicroBatches(given.model).load_state_dict(state),
        {"state": _is({"size": 0, "fits": 0, "fails": 0})},
    ),
    "checkpoint.RandomState.begin": (lambda _, step: checkpoint.RandomState(0).begin(step), {"step": _is(0, "3 -1")}),
    "checkpoint.RandomState.load_state_dict": (
        lambda _, state: checkpoint.RandomState(0).load_state_dict(state),
        {"state": _is({"seed": 0, "step": None})},
    ),
}
# Values (their use checks them), what hands out and takes back itself, and what is called by the library alone.
UNCHECKED = set(
    "CPUOffloadPolicy DataParallelMeshDims MixedPrecisionPolicy OffloadPolicy ShardPlacementResult install uninstall "
    "checkpoint.close GradScaler".split()
)


def _calls() -> dict[str, tuple[Callable[..., Any], dict[str, Argument]]]:
    found: dict[str, Any] = {
        name: (lambda _, fn=fn, **kwargs: fn(**kwargs), arguments) for name, (fn, arguments) in FUNCTIONS.items()
    }
    for name, arguments in METHODS.items():
        found[f"model.{name}"] = (lambda given, name=name, **kwargs: getattr(given.model, name)(**kwargs), arguments)
    return {**found, **OBJECTS}


CALLS = _calls()


@pytest.fixture(autouse=True)
def _keep_random_state() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        yield


@pytest.mark.sample(25)
@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_argument_is_named_and_nothing_changes(name: str, tmp_path: Path) -> None:
    call, arguments = CALLS[name]
    with fake_world(2), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = Given(tmp_path)
        for argument, about in arguments.items():
            for kind, wrong in _kinds().items():
                if kind in about.taken.split():
                    continue
                kwargs = {name: each.valid(given) for name, each in arguments.items()}
                kwargs[argument] = wrong
                before = given.state()
                with pytest.raises(ERRORS) as caught:
                    call(given, **kwargs)
                text, what = str(caught.value), f"{argument}={kind}: {caught.value}"
                assert (about.called or argument) in text, what
                assert not any(words in text for words in ("object is not", "has no attribute", "unhashable")), what
                assert given.state() == before, what


def _made_of_nothing(value: Any) -> bool:
    return inspect.isclass(value) and (issubclass(value, BaseException) or issubclass(value, tuple))


def test_the_whole_surface_is_here() -> None:
    """Every public function, and every argument of it; every method of `FSDPModule`."""
    missing = []
    for prefix, namespace in (("", fullshard), ("checkpoint.", checkpoint), ("observe.", observe)):
        names = getattr(namespace, "__all__", None) or [name for name in vars(namespace) if not name.startswith("_")]
        for name in names:
            value = getattr(namespace, name)
            dotted = name if prefix == "observe." and name in FUNCTIONS else f"{prefix}{name}"
            if isinstance(value, types.FunctionType) and dotted not in UNCHECKED:
                known = FUNCTIONS.get(dotted, (None, {}))[1]
                missing += [f"{dotted}({p})" for p in inspect.signature(value).parameters if p not in known]
                missing += [dotted] if dotted not in FUNCTIONS else []
    methods = vars(fullshard.FSDPModule)
    for name, method in methods.items():
        if not (name.startswith("_") or hasattr(nn.Module, name)) and isinstance(method, types.FunctionType):
            known = METHODS.get(name, {})
            missing += [f"model.{name}({p})" for p in list(inspect.signature(method).parameters)[1:] if p not in known]
    assert not missing


@pytest.mark.parametrize("factor", [-2, 0, -0.5, math.nan, math.inf])
def test_a_divide_factor_is_above_0(factor: float, tmp_path: Path) -> None:
    with fake_world(2):
        with pytest.raises(ValueError, match="factor: expected a finite number above 0"):
            Given(tmp_path).model.set_gradient_divide_factor(factor)


@pytest.mark.parametrize("max_norm", [-1, -1e-9, math.nan, torch.tensor(-1.0)])
def test_a_norm_is_not_negative(max_norm: Any, tmp_path: Path) -> None:
    with fake_world(2):
        with pytest.raises(ValueError, match="max_norm: expected a number of at least 0"):
            fullshard.clip_grad_norm_(Given(tmp_path).model.parameters(), max_norm)


def test_what_is_as_good_is_taken(tmp_path: Path) -> None:
    """0 and 1 for flags, numpy's numbers, tensors of one element, torch's spelling of the maximum norm."""
    numpy = pytest.importorskip("numpy")
    with fake_world(2):
        given = Given(tmp_path)
        for flag in (0, 1, numpy.bool_(True), numpy.int64(0)):
            given.model.set_requires_gradient_sync(flag)
            assert given.model._unit().record.plan.sync is bool(flag)
        for max_norm in (0, numpy.float32(1.5), torch.tensor(1.0), math.inf):
            fullshard.clip_grad_norm_(given.model.parameters(), max_norm, "inf")
        given.model.set_gradient_divide_factor(numpy.float64(2.0))


@pytest.mark.parametrize("temperature", ["nan", "inf", "-1", "warm"])
def test_the_temperature_of_generated_text(temperature: str, capsys: Any) -> None:
    from fullshard.cli import main

    with contextlib.suppress(SystemExit):
        assert main(["generate", "runs/none", f"--temperature={temperature}"]) == 2
    assert "argument --temperature: " in capsys.readouterr().err
