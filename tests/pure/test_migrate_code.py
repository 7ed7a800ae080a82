"""`fullshard migrate CODE.py` without running anything: what is found, what is left alone, and what is refused."""

from __future__ import annotations

import ast
import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fullshard.cli import main
from fullshard.migrate.code import Migration, arguments, migrate_code
from fullshard.migrate.verdict import EQUIVALENT, UNSUPPORTED
from tests.harness.migrations import entry, names, told, uses_fsdp1

HEAD = """\
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType
from torch.nn.parallel import DistributedDataParallel as DDP

"""


def _migrated(folder: Path, text: str) -> Migration:
    path = folder / "train.py"
    path.write_text(text)
    return migrate_code(path)


# ---- look-alikes -----------------------------------------------------------------------------------------------------

LOOK_ALIKES = {
    "a class of the program": """\
class FSDP:
    def __init__(self, model): self.model = model
    def no_sync(self): return self
    def clip_grad_norm_(self, value): return value

model = FSDP(3)
with model.no_sync():
    model.clip_grad_norm_(1.0)
""",
    "fairscale": """\
from fairscale.nn import FullyShardedDataParallel as FSDP
model = FSDP(net, reshard_after_forward=True)
model.clip_grad_norm_(1.0)
torch.save(model.state_dict(), "x")
""",
    "accelerate": """\
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
with accelerator.no_sync(model):
    loss.backward()
accelerator.clip_grad_norm_(model.parameters(), 1.0)
""",
    "lightning": """\
from lightning.pytorch.strategies import FSDPStrategy, DDPStrategy
trainer = Trainer(strategy=FSDPStrategy(sharding_strategy="FULL_SHARD"))
""",
    "torch's own clipping": """\
import torch
from torch.nn.utils import clip_grad_norm_
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
clip_grad_norm_(model.parameters(), 1.0)
scaler = torch.amp.GradScaler("cuda")
torch.save(model.state_dict(), "x")
""",
    "texts and comments": '''\
"""FSDP(model, sharding_strategy=ShardingStrategy.FULL_SHARD) is what we had."""
# model = FSDP(model); with model.no_sync(): ...
HELP = "from torch.distributed.fsdp import FullyShardedDataParallel"
''',
    "a name that hides the import": """\
from torch.nn.parallel import DataParallel
def build(FSDP, DDP):
    model = FSDP(DDP(net))
    return model.module.state_dict()
""",
    "an attribute named module": """\
class Holder:
    def __init__(self, module): self.module = module
holder = Holder(net)
holder.module.state_dict()
holder.state_dict()
""",
    "DataParallel": "import torch\nmodel = torch.nn.DataParallel(net)\nmodel.module.state_dict()\n",
    "a module beside it with torch's names": "from wrap import ModuleWrapPolicy as P, wrap\nwrap(P({int}))\n",
    "fullshard already": "from fullshard import fully_shard\nfully_shard(net)\nnet.set_requires_gradient_sync(False)\n",
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_a_look_alike_stays_untouched(name: str, tmp_path: Path) -> None:
    found = _migrated(tmp_path, LOOK_ALIKES[name])
    assert (found.texts, found.findings) == ({}, [])


def test_other_models_beside_a_wrapped_one_stay_untouched(tmp_path: Path) -> None:
    text = f"""{HEAD}
class Averaged(nn.Module):
    def no_sync(self): ...

model = FSDP(net)
teacher = Averaged()
optimizer = torch.optim.SGD(model.parameters())
torch.save(teacher.state_dict(), "teacher.pt")
torch.save(optimizer.state_dict(), "optimizer.pt")
plain = net2.state_dict()
before = other.module.weight
"""
    new = next(new for _, new in _migrated(tmp_path, text).texts.values())
    assert text.split("teacher = ")[1] == new.split("teacher = ")[1]


def test_a_state_dict_before_the_model_is_wrapped_stays_plain(tmp_path: Path) -> None:
    text = (
        f"{HEAD}\ndef main(model):\n    model.load_state_dict(x)\n    a = model.state_dict()\n    model = FSDP(model)\n"
    )
    new = next(new for _, new in _migrated(tmp_path, text).texts.values())
    assert "    a = model.state_dict()\n    fully_shard(model)\n" in new


# ---- what keeps FSDP1's class, or stays as it is, with a reason ------------------------------------------------------

# One line that has none of the shapes, and the whole program keeps FSDP1's class: it runs as it is, by another import.
KEPT = {
    "a policy from elsewhere": (
        "model = FSDP(net, auto_wrap_policy=get_policy())",
        "get_policy() is none of the policies",
    ),
    "a policy that is a parameter": (
        "def f(policy):\n    return FSDP(net, auto_wrap_policy=policy)",
        "shard the units",
    ),
    "a policy of functions": (
        "from torch.distributed.fsdp.wrap import CustomPolicy\nm = FSDP(net, auto_wrap_policy=CustomPolicy(f))",
        "by class, by size",
    ),
    "a strategy that is a parameter": (
        "def f(s):\n    return FSDP(net, sharding_strategy=s)",
        "sharding_strategy=s is not known",
    ),
    "a strategy of a flag": (
        "model = FSDP(net, sharding_strategy=ShardingStrategy[args.strategy])",
        "ShardingStrategy[args.strategy] is not known before it runs",
    ),
    "strategies that are no one argument": (
        "model = FSDP(net, sharding_strategy=ShardingStrategy.NO_SHARD if x else ShardingStrategy.FULL_SHARD)",
        "not one argument",
    ),
    "a table of strategies that is used twice": (
        "T = {'a': ShardingStrategy.FULL_SHARD, 'b': ShardingStrategy.SHARD_GRAD_OP}\nprint(T)\n"
        "model = FSDP(net, sharding_strategy=T[x])",
        "T[x] is not known",
    ),
    "nodes without a mesh": ("model = FSDP(net, sharding_strategy=ShardingStrategy.HYBRID_SHARD)", "device_mesh="),
    "settings from elsewhere": ("model = FSDP(net, **load())", "settings in * and **"),
    "settings that are set one by one": (
        "kw = {}\nkw['sharding_strategy'] = ShardingStrategy.SHARD_GRAD_OP\nmodel = FSDP(net, **kw)",
        "settings in * and **",
    ),
    "settings in a list": ("model = FSDP(*everything)", "settings in * and **"),
    "two process groups": ("model = FSDP(net, process_group=(a, b))", "init_device_mesh"),
    "a device with an effect": ("model = FSDP(net, device_id=set_up(args))", "an effect of its own"),
    "precision of a dataclass": (
        "import dataclasses\n@dataclasses.dataclass\nclass Config:\n    mp: object = MixedPrecision(torch.bfloat16)\n"
        "model = FSDP(net, mixed_precision=Config().mp)",
        "Config().mp is not known",
    ),
    "classes that stay in float32": (
        "model = FSDP(net, auto_wrap_policy=W, mixed_precision=MixedPrecision(torch.float16, torch.float32))\n"
        "nn.BatchNorm1d(3)",
        "output_dtype=param_dtype",
    ),
    "a nameless model with a policy": ("train(FSDP(Net(), auto_wrap_policy=W))", "give it one before"),
    "a model that need not be wrapped": ("m = FSDP(net, auto_wrap_policy=W) if many else net", "need not run"),
    "a type of state that is a parameter": (
        "def f(kind):\n    m = FSDP(net)\n    with FSDP.state_dict_type(m, kind):\n        return m.state_dict()",
        "not known before it runs",
    ),
    "a config that is set twice": (
        "m = FSDP(net)\nc = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)\nc = FullStateDictConfig()\n"
        "with FSDP.state_dict_type(m, StateDictType.FULL_STATE_DICT, c):\n    x = m.state_dict()",
        "c is not known before it runs",
    ),
    "a state dict that another function makes": (
        "model = FSDP(net)\nwith FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):\n    save(model)",
        "goes to another function",
    ),
    "no state dict in the context": (
        "model = FSDP(net)\nwith FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):\n    save()",
        "made in other functions",
    ),
    "a subclass": ("class Mine(FSDP):\n    def extra(self): return 1\nmodel = Mine(net)", "move its methods"),
    "a partial": (
        "import functools\nshard = functools.partial(FSDP, use_orig_params=True)\nmodel = shard(net)",
        "none of the shapes",
    ),
    "wrap and enable_wrap": (
        "from torch.distributed.fsdp.wrap import enable_wrap, wrap\n"
        "with enable_wrap(wrapper_cls=FSDP):\n    x = wrap(net)",
        "none of the shapes",
    ),
    "the class as a value": ("m = FSDP(net)\nregister(FSDP)", "none of the shapes"),
    "either of two": (
        "try:\n    from fairscale import Sharded as Wrap\nexcept ImportError:\n    Wrap = FSDP\n"
        "m = FSDP(a)\nmodel = Wrap(net)",
        "none of the shapes",
    ),
    "a model that cannot be followed": (
        "m = FSDP(net)\ndef f(models):\n    for x in models.values():\n        with x.no_sync(): pass",
        "whether x is sharded was not found out",
    ),
    "a loaded optimizer far away": (
        "m = FSDP(net)\nsend(FSDP.optim_state_dict_to_load(m, opt, state))",
        "found no optimizer.load_state_dict",
    ),
}
TYPES = """\
from torch.distributed.fsdp import FullStateDictConfig, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
W = ModuleWrapPolicy({nn.Linear})
"""


@pytest.mark.parametrize("name", KEPT)
def test_one_line_that_is_not_known_and_the_program_keeps_fsdp1_s_class(name: str, tmp_path: Path) -> None:
    """A wrapper and what belongs to it change together: but for imports nothing changes, and the reason is said."""
    text, reason = KEPT[name]
    found = _migrated(tmp_path, HEAD + TYPES + text + "\n")
    told = [each for each in found.findings if reason in each.reason]
    assert told and {each.verdict for each in told} == {EQUIVALENT}, found.findings
    assert all(each.setting == "fullshard.compat.fsdp1" for each in told)
    assert not [each for each in found.findings if each.verdict == UNSUPPORTED]
    ((old, new),) = found.texts.values()
    assert _without_imports(old) == _without_imports(new)
    assert "from fullshard.compat.fsdp1 import FullyShardedDataParallel as FSDP, StateDictType" in new


def _without_imports(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.strip().startswith(("from ", "import "))]


BY_HAND = {
    "an argument that is none": ("model = FSDP(net, flatten=True)", "there is no argument flatten"),
    "DDP in an expression": ("net = net.cuda()\nmodel = DDP(net) if many else net", "a statement of its own"),
    "DDP in a lambda": ("make = lambda m: DDP(m)", "need not run"),
    "a device with an effect": ("model = DDP(net, device_ids=[set_up()])", "move it to a line before"),
    "local state dicts": (
        "m = FSDP(net)\nwith FSDP.state_dict_type(m, StateDictType.LOCAL_STATE_DICT):\n    x = m.state_dict()",
        "no flat parameters",
    ),
    "a hook of communication": ("model = DDP(net)\nmodel.register_comm_hook(None, hook)", "reduce_dtype"),
    "a hook of communication of FSDP1": ("model = FSDP(net)\nmodel.register_comm_hook(None, hook)", "reduce_dtype"),
    "a full state dict on one of three": (
        "model = DDP(net)\nif dist.get_rank() == 0 or debug:\n    torch.save(model.state_dict(), 'x')",
        "only some ranks come here (`dist.get_rank() == 0 or debug`",
    ),
    "a full state dict on the main process, deeper": (
        "model = DDP(net)\nif epoch % 2 == 0 and args.is_main_process:\n"
        "    if done:\n        torch.save(model.state_dict(), 'x')",
        "only some ranks come here (`epoch % 2 == 0 and args.is_main_process`",
    ),
    "a full state dict after a return": (
        "model = DDP(net)\ndef save():\n    if rank != 0:\n        return\n    torch.save(model.state_dict(), 'x')",
        "(`rank != 0`",
    ),
    "a decorator": (
        "model = DDP(net)\n@rank_zero_only\ndef save():\n    torch.save(model.state_dict(), 'x')",
        "(`@rank_zero_only`",
    ),
    "a caller": (
        "model = DDP(net)\nif gpu_id == 0:\n    save(model)\ndef save(m):\n    torch.save(m.module.state_dict(), 'x')",
        "(`gpu_id == 0`",
    ),
    "evaluation on one rank": (
        "model = DDP(net)\nif master_process:\n    evaluate()\ndef evaluate():\n    model(x)",
        "let all ranks run it",
    ),
    "a method on one rank": (
        "model = DDP(net)\nmain = rank == 0\nif main:\n    model.module.generate(x)",
        "let all ranks run it",
    ),
    "a model that goes away on one rank": (
        "model = DDP(net)\nif is_main_process():\n    show(model)",
        "let all ranks run it",
    ),
    "save_pretrained": ("model = DDP(net)\nmodel.module.save_pretrained('x')", "state_dict=state"),
    "a pickled model": ("model = DDP(net)\ntorch.save(model.module, 'x')", "does not pickle"),
    "state of the optimizer": (
        "model = DDP(net)\nopt = torch.optim.Adam(model.parameters())\ntorch.save(opt.state_dict(), 'x')",
        "get_optimizer_state_dict(model, optimizer",
    ),
    "an optimizer that is built first elsewhere": (
        "def build():\n    net = Net()\n    opt = torch.optim.Adam(net.parameters())\n    wrap(net)\n    opt.step()\n"
        "def wrap(model):\n    model = DDP(model)",
        "it is built before the model is sharded in ",
    ),
    "a look at gradient synchronisation": ("model = DDP(net)\nif model.require_backward_grad_sync: pass", "it is read"),
    "join": ("model = DDP(net)\nwith model.join():\n    pass", "fullshard.joined"),
    "gradients of full parameters": (
        "model = FSDP(net)\nwith FSDP.summon_full_params(model, with_grads=True):\n    pass",
        "full_tensor()",
    ),
    "an unknown method": ("model = FSDP(net)\nFSDP.rekey_optim_state_dict(a, b, model)", "there are no numbers"),
    "flat parameters": ("def f(x):\n    m = FSDP(net, **x)\n    m._flat_param.zero_()", "no flat parameters"),
    "a plugin of another library": (
        "from accelerate import FullyShardedDataParallelPlugin\n"
        "from torch.distributed.fsdp import ShardingStrategy\n"
        "p = FullyShardedDataParallelPlugin(sharding_strategy=ShardingStrategy.FULL_SHARD)",
        "FullyShardedDataParallelPlugin of another library",
    ),
    "a model of DDP that cannot be followed": (
        "m = DDP(net)\ndef f(models):\n    for x in models.values():\n        with x.no_sync(): pass",
        "whether x is sharded was not found out",
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_what_is_not_sure_stays_as_it_is(name: str, tmp_path: Path) -> None:
    text, reason = BY_HAND[name]
    found = _migrated(tmp_path, HEAD + text + "\n")
    refused = [each for each in found.findings if each.verdict == UNSUPPORTED and reason in each.reason]
    assert refused, found.findings
    where = refused[-1].place.line
    for _, new in found.texts.values():
        kept = (HEAD + text).splitlines()[where - 1]
        assert kept in new.splitlines() or ".module" in kept


NO_GUARDS = {
    "is there more than one": "if local_rank != -1:\n    torch.save(model.state_dict(), 'x')",
    "a number of ranks": "if world_size > 1:\n    torch.save(model.state_dict(), 'x')",
    "every rank": "if rank >= 0:\n    torch.save(model.state_dict(), 'x')",
    "a number of devices": "if args.n_gpu > 1 or num_gpu == 0:\n    torch.save(model.state_dict(), 'x')",
    "another if": "if rank == 0:\n    print(1)\ntorch.save(model.state_dict(), 'x')",
}


@pytest.mark.parametrize("name", NO_GUARDS)
def test_a_condition_that_all_ranks_meet(name: str, tmp_path: Path) -> None:
    found = _migrated(tmp_path, f"{HEAD}model = DDP(net)\n{NO_GUARDS[name]}\n")
    assert not [each for each in found.findings if each.verdict == UNSUPPORTED]


def test_variables_that_are_each_other_end(tmp_path: Path) -> None:
    found = _migrated(tmp_path, f"{HEAD}a = b\nb = a\nc = c\nmodel = FSDP(net, cpu_offload=a, auto_wrap_policy=c)\n")
    assert any("cpu_offload=a is not known" in each.reason for each in found.findings)


def test_private_parts_of_torch_are_named(tmp_path: Path) -> None:
    text = "import torch.distributed.fsdp\nx = torch.distributed.fsdp._fully_shard._fsdp_common.FSDPMeshInfo\n"
    (found,) = _migrated(tmp_path, text).findings
    assert found.verdict == UNSUPPORTED and "is a private part of torch" in found.reason


def test_one_rank_writes_what_all_gather(tmp_path: Path) -> None:
    text = (
        f"{HEAD}model = DDP(net)\nfor epoch in range(4):\n    if epoch % 2 == 0 and rank == 0:\n"
        "        path = f'{epoch}.pt'\n        torch.save(model.module.state_dict(), path)\n"
    )
    found = _migrated(tmp_path, text)
    assert not [each for each in found.findings if each.verdict == UNSUPPORTED]
    new = next(new for _, new in found.texts.values())
    gathered = "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))"
    assert (
        f"    if epoch % 2 == 0:\n        model_state = {gathered}\n    if epoch % 2 == 0 and rank == 0:\n"
        "        path = f'{epoch}.pt'\n        torch.save(model_state, path)\n"
    ) in new


def test_the_call_that_sets_a_device_up_stays(tmp_path: Path) -> None:
    """Its value was used by arguments that go away; what else it does is still needed."""
    text = f"{HEAD}device = init_distributed_device(args)\nmodel = FSDP(net, device_id=device)\n"
    new = next(new for _, new in _migrated(tmp_path, text).texts.values())
    assert "device = init_distributed_device(args)\nmodel = fully_shard(net)\n" in new


def test_the_helper_switches_gradients_off_and_on_again(tmp_path: Path) -> None:
    found = _migrated(tmp_path, f"{HEAD}model = DDP(net)\nwith model.no_sync():\n    work()\n")
    new = next(new for _, new in found.texts.values())
    helper = new[new.index("@contextlib") : new.index("sync_module_states(net)")]
    calls: list[bool] = []
    names: dict[str, Any] = {"contextlib": contextlib}
    exec(helper, names)
    model = SimpleNamespace(set_requires_gradient_sync=calls.append)
    with pytest.raises(KeyError), names["no_sync"](model):
        assert calls == [False]
        raise KeyError
    assert calls == [False, True]


# ---- formatting ------------------------------------------------------------------------------------------------------


KEEP_THE_CLASS = set(
    "batch_norms lambda_policies manual_wrap own_policy partial_wrap settings_in_a_dict subclasses flags hybrid_groups "
    "dataclass_config kwargs_one_by_one older_optimizer_state lightning_module own_wrapper".split()
)


@pytest.mark.sample(16)
@pytest.mark.parametrize("name", names())
def test_every_program_is_converted_whole(name: str) -> None:
    """Nothing is left by hand. Nothing of FSDP1 or DDP is left, or its class is the adapter's."""
    found = migrate_code(entry(name))
    assert not [each for each in found.findings if each.verdict == UNSUPPORTED]
    for old, new in found.texts.values():
        if any(each.setting == "fullshard.compat.fsdp1" for each in found.findings):
            assert "fullshard.compat.fsdp1" in new and name in KEEP_THE_CLASS
            continue
        for word in (
            "FullyShardedDataParallel",
            "DistributedDataParallel",
            "ShardingStrategy",
            "torch.distributed.fsdp",
        ):
            new = new.replace("import torch.distributed.fsdp.wrap\n", "")  # has no effect
            assert word not in new.partition('"""\n')[2] or "optional" in name, word
        kept = [line for line in old.splitlines() if line.strip().startswith("#")]
        assert all(line.strip() in new for line in kept if "rank 0's are taken" not in line)


@pytest.mark.parametrize("path", told(), ids=lambda path: path.stem)
def test_every_line_that_needs_a_person_is_named(path: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exactly those that the program marks, and the exit code is 1."""
    (here / "program.py").write_text(path.read_text())
    assert main(["migrate", "program.py", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    lines = {each["place"]["line"] for each in said["findings"] if each["verdict"] == UNSUPPORTED}
    marked = {number for number, line in enumerate(path.read_text().splitlines(), 1) if line.endswith("# told")}
    assert lines == marked


@pytest.mark.sample(14)
@pytest.mark.parametrize("name", [name for name in names() if uses_fsdp1(name)])
def test_the_adapter_changes_imports_alone(name: str) -> None:
    found = migrate_code(entry(name), adapter=True)
    assert found.texts and {each.verdict for each in found.findings} == {EQUIVALENT}
    for old, new in found.texts.values():
        old, new = (text.replace("fsdp.FullyShardedDataParallel", "compat.FSDP") for text in (old, new))
        new = new.replace("fullshard.compat.fsdp1.FullyShardedDataParallel", "compat.FSDP")
        assert _statements(old) == _statements(new)


def _statements(text: str) -> list[str]:
    """Without imports."""
    found = ast.walk(ast.parse(text))
    return [ast.unparse(node) for node in found if isinstance(node, (ast.Assign, ast.Expr, ast.Return, ast.With))]


def test_formatting_is_kept(tmp_path: Path) -> None:
    """Only what changes is written anew, to the byte: quotes, spaces, line ends, comments."""
    old = (
        "# a program\r\nimport torch\r\nfrom torch.distributed.fsdp import FullyShardedDataParallel as FSDP\r\n\r\n"
        "def f( x ,y ) :   # odd\r\n\tnet = FSDP( x,  # the model\r\n\t\tuse_orig_params = True )\r\n\treturn  net\r\n"
    )
    path = tmp_path / "train.py"
    path.write_bytes(old.encode())
    new = next(new for _, new in migrate_code(path).texts.values())
    wanted = old.replace(
        "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP", "from fullshard import fully_shard"
    )
    assert new == wanted.replace("FSDP( x,  # the model\r\n\t\tuse_orig_params = True )", "fully_shard(x)")


def test_arguments_that_stay_keep_their_lines(tmp_path: Path) -> None:
    text = f"""{HEAD}from torch.distributed.fsdp import MixedPrecision
half = MixedPrecision(
    param_dtype=torch.bfloat16,  # compute

    # and the sum
    reduce_dtype=torch.float32,
    buffer_dtype=torch.bfloat16,  # lost
)
model = FSDP(net, mixed_precision=half)
"""
    found = _migrated(tmp_path, text)
    new = next(new for _, new in found.texts.values())
    assert "half = MixedPrecisionPolicy(\n    param_dtype=torch.bfloat16,  # compute\n\n    # and the sum\n" in new
    assert ["buffer_dtype"] == [each.key for each in found.findings if each.verdict == "lossy"]


# ---- tables ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argument", arguments.REMOVED)
def test_seed_000_s_removed_argument(argument: str) -> None:
    """Each is found in the program that has all seven, and is gone afterwards."""
    found = migrate_code(entry("seed_000_removed"))
    old, new = next(iter(found.texts.values()))
    assert f"{argument}=" in old and f"{argument}=" not in new
    if argument != "param_init_fn":  # None there: seed_001 has one
        assert argument in {each.key for each in found.findings}


SEED_001_ROWS = {
    "sharding_strategy=FULL_SHARD": "",
    "sharding_strategy=SHARD_GRAD_OP": "reshard_after_forward=False",
    "cpu_offload=CPUOffload(offload_params=True)": "offload_policy=CPUOffloadPolicy()",
    "backward_prefetch=BACKWARD_PRE": "",
    "use_orig_params=True": "",
    "ignored_params": "ignored_params=set([model[2].bias])",
    "no_sync()": "no_sync(model)",
}


@pytest.mark.parametrize("old", SEED_001_ROWS)
def test_seed_001_s_row(old: str) -> None:
    """The new text has what seed 001 says, and the old words are gone."""
    before, after = next(iter(migrate_code(entry("seed_001_rows")).texts.values()))
    name = {"ignored_params": "ignored_states", "no_sync()": "model.no_sync"}.get(old, old.partition("=")[0])
    assert name in before and name not in after.partition('"""\n')[2]
    assert SEED_001_ROWS[old] in after


def test_every_argument_of_torch_is_in_the_tables() -> None:
    """An argument that a later torch adds has to be judged. Tables are those of the newest torch of the range, and an
    earlier one has fewer."""
    import inspect

    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.nn.parallel import DistributedDataParallel

    assert list(arguments.FSDP1_ARGUMENTS) == list(inspect.signature(FullyShardedDataParallel.__init__).parameters)[1:]
    ddp = list(inspect.signature(DistributedDataParallel.__init__).parameters)[1:]
    newer = {"bucket_cap_mb_list", "batched_grad_copy", "forward_sync_buffers", "lazy_bucket_allocation"}
    assert ddp == [name for name in arguments.DDP_ARGUMENTS if name in ddp or name not in newer]
    assert list(arguments.MIXED_PRECISION_ARGUMENTS) == list(inspect.signature(MixedPrecision).parameters)
    judged = {each.old.partition("=")[0] for each in (*arguments.FSDP1, *arguments.STRATEGIES)}
    assert judged == set(arguments.FSDP1_ARGUMENTS) - {"module"}
    assert {each.old for each in arguments.DDP} == set(arguments.DDP_ARGUMENTS) - {"module"}


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_writes_a_patch_that_applies(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import subprocess

    text = entry("trainer_class").read_text()
    (here / "train.py").write_text(text)
    assert main(["migrate", "train.py"]) == 0
    said = capsys.readouterr().out
    assert "train.py:12: exact: FullyShardedDataParallel -> fully_shard(model)" in said
    assert (here / "train.py").read_text() == text
    subprocess.run(["patch", "-p1", "-i", "train.patch"], check=True, capture_output=True)
    assert (here / "train.py").read_text() == migrate_code(entry("trainer_class")).texts[str(entry("trainer_class"))][1]
    (here / "train.patch").unlink()
    assert main(["migrate", "train.py"]) == 0
    assert capsys.readouterr().out.endswith("nothing changes\n") and not (here / "train.patch").exists()


def test_the_exit_code_and_what_is_accepted(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "a.py").write_text(f"{HEAD}make = lambda net: DDP(net)\n")
    assert main(["migrate", "a.py"]) == 1
    assert main(["migrate", "a.py", "--accept-lossy", "DistributedDataParallel", "--json"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["counts"]["unsupported"] == 1 and said["findings"][0]["accepted"] and said["patch"] is None
    assert main(["migrate", "a.py", "--accept-lossy", "nothing"]) == 2
    assert "--accept-lossy nothing: expected a key with the verdict lossy" in capsys.readouterr().err


BAD = {
    "a syntax error": ("x = (1,\ny = 2\n", "bad.py:1:5: a syntax error: '(' was never closed; fix it first"),
    "a wrong indent": ("def f():\nreturn 1\n", "bad.py:2:1: a syntax error: expected an indented block after"),
    "no text": ("\x00\x01", "bad.py:"),
    "no such encoding": ("# -*- coding: nonsense -*-\n", "bad.py: "),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, place = BAD[name]
    (here / "bad.py").write_text(text)
    assert main(["migrate", "bad.py"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and place in said.err
    assert [path.name for path in here.iterdir()] == ["bad.py"]


def test_other_mistakes_are_one_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", "absent.py"]) == 2
    assert "absent.py: cannot be read: No such file" in capsys.readouterr().err
    (here / "a.py").write_text(f"{HEAD}model = FSDP(net)\n")
    (here / "a.patch").touch()
    assert main(["migrate", "a.py"]) == 2
    assert "a.patch: expected no file there" in capsys.readouterr().err


def test_a_folder_is_a_summary_and_a_patch_for_each_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import shutil
    import subprocess

    shutil.copytree(entry("package_beside").parents[1], here / "repo", ignore=shutil.ignore_patterns("__pycache__"))
    (here / "repo/scripts/evaluate.py").write_text((told()[0].parent / "ddp_evaluation.py").read_text())
    (here / "repo/.venv").mkdir()
    (here / "repo/.venv/broken.py").write_text("(")
    assert main(["migrate", "repo"]) == 1
    said = capsys.readouterr().out
    assert " -> repo.patches/engine/sharding.py.patch" in said
    assert "2 lines need you:\nrepo/scripts/evaluate.py:25: unsupported: self.model()" in said
    assert "3 of 6 files change" in said
    patches = sorted(str(path.relative_to(here)) for path in here.rglob("*.patch"))
    assert patches == [
        f"repo.patches/{name}.py.patch" for name in ("engine/sharding", "engine/training", "scripts/evaluate")
    ]
    for each in patches:
        subprocess.run(["patch", "-p1", "-i", each], check=True, capture_output=True)
    assert "fully_shard(module)" in (here / "repo/engine/sharding.py").read_text()
    (here / "repo/again.py").write_text(f"{HEAD}model = FSDP(net)\n")
    assert main(["migrate", "repo"]) == 2
    assert "repo.patches: expected no file there" in capsys.readouterr().err
    (here / "repo/scripts/train.py").write_text("(")
    assert main(["migrate", "repo", "--output", "more"]) == 2 and not (here / "more").exists()
    assert "repo/scripts/train.py:1:1: a syntax error" in capsys.readouterr().err


def test_a_package_beside_the_folder_of_a_program_is_followed() -> None:
    found = migrate_code(entry("package_beside"))
    files = ["train.py", "__init__.py", "models.py", "sharding.py", "training.py"]
    assert [Path(path).name for path in found.files] == files
    assert [Path(path).name for path in found.texts] == ["sharding.py", "training.py"]


def test_the_adapter_is_for_programs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "a.yaml").write_text("a: 1\n")
    assert main(["migrate", "--adapter", "a.yaml"]) == 2
    assert "--adapter a.yaml: expected a program or a folder" in capsys.readouterr().err
    (here / "empty").mkdir()
    assert main(["migrate", "empty"]) == 2
    assert "empty: expected a folder with programs" in capsys.readouterr().err


def test_the_names_of_the_adapter_are_those_of_its_module() -> None:
    from fullshard.compat import fsdp1

    assert list(arguments.ADAPTER_NAMES) == sorted(fsdp1.__all__)
    missing = [
        name for name in dir(torch_fsdp1()) if name[0] != "_" and not hasattr(fsdp1.FullyShardedDataParallel, name)
    ]
    assert set(missing) <= {*arguments.ADAPTER_REFUSES, "check_is_root"}


def torch_fsdp1() -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel
