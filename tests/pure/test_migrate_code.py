"""`fullshard migrate CODE.py` without running anything: what is found, what is left alone, and what is refused."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fullshard.cli import main
from fullshard.migrate.code import Migration, arguments, migrate_code
from fullshard.migrate.verdict import UNSUPPORTED, MigrationError
from tests.harness.migrations import entry, names

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


# ---- classes that mixed precision leaves out -------------------------------------------------------------------------

LEFT_OUT = {
    "written elsewhere": ("b = make()\nf(MixedPrecision(torch.float16), nn.BatchNorm1d)", "lossy"),
    "a conditional policy": (
        "b = MixedPrecision(torch.float16, _module_classes_to_ignore=C)\n"
        "m = FSDP(m, auto_wrap_policy=W, mixed_precision=b if use else None)",
        "exact",
    ),
    "without a policy": (
        "m = FSDP(m, mixed_precision=MixedPrecision(torch.float16, _module_classes_to_ignore=C))",
        "dropped",
    ),
    "no classes": (
        "m = FSDP(m, auto_wrap_policy=W, mixed_precision=MixedPrecision(torch.float16, _module_classes_to_ignore=()))",
        "",
    ),
    "no BatchNorm": ("m = FSDP(m, auto_wrap_policy=W, mixed_precision=MixedPrecision(torch.float16))", ""),
    "no narrow compute": (
        "m = FSDP(m, auto_wrap_policy=W, mixed_precision=MixedPrecision(None, _module_classes_to_ignore=C))",
        "",
    ),
}


@pytest.mark.parametrize("case", LEFT_OUT)
def test_classes_that_mixed_precision_leaves_out(case: str, tmp_path: Path) -> None:
    """What is said of them. tests/migrations/programs/batch_norms.py trains what is written."""
    text, verdict = LEFT_OUT[case]
    head = (
        f"{HEAD}from torch.distributed.fsdp import MixedPrecision\n"
        "from torch.distributed.fsdp.wrap import ModuleWrapPolicy\nW = ModuleWrapPolicy({nn.Linear})\n"
    )
    found = _migrated(tmp_path, f"{head}{text}\n")
    said = [each.verdict for each in found.findings if each.key == "_module_classes_to_ignore"]
    assert said == ([verdict] if verdict else [])
    ((_, new),) = found.texts.values()
    full = "fully_shard(module, mp_policy=MixedPrecisionPolicy(torch.float32, torch.float32, (b if use"
    assert (full in new) == (verdict == "exact")


# ---- what stays as it is, with a reason ------------------------------------------------------------------------------

BY_HAND = {
    "a policy from elsewhere": ("model = FSDP(net, auto_wrap_policy=get_policy())", "none that torch has"),
    "a policy that is a parameter": (
        "def f(policy):\n    return FSDP(net, auto_wrap_policy=policy)",
        "shard the units",
    ),
    "a strategy that is a parameter": (
        "def f(s):\n    return FSDP(net, sharding_strategy=s)",
        "not known before it runs",
    ),
    "settings from elsewhere": ("model = FSDP(net, **load())", "**load() is not written in one place"),
    "settings in a list": ("model = FSDP(*everything)", "*everything is not known"),
    "an argument that is none": ("model = FSDP(net, flatten=True)", "has no argument flatten"),
    "two process groups": (
        "from torch.distributed.fsdp import ShardingStrategy\n"
        "model = FSDP(net, process_group=(a, b), sharding_strategy=ShardingStrategy.HYBRID_SHARD)",
        "init_device_mesh",
    ),
    "DDP in an expression": ("net = net.cuda()\nmodel = DDP(net) if many else net", "a statement of its own"),
    "DDP in a lambda": ("make = lambda m: DDP(m)", "need not run"),
    "a nameless model with a policy": (
        "from torch.distributed.fsdp.wrap import ModuleWrapPolicy\n"
        "train(FSDP(Net(), auto_wrap_policy=ModuleWrapPolicy({Net})))",
        "give it one before",
    ),
    "local state dicts": (
        "m = FSDP(net)\nwith FSDP.state_dict_type(m, StateDictType.LOCAL_STATE_DICT):\n    x = m.state_dict()",
        "no flat shards",
    ),
    "a type of state that is a parameter": (
        "def f(kind):\n    m = FSDP(net)\n    with FSDP.state_dict_type(m, kind):\n        return m.state_dict()",
        "not known before it runs",
    ),
    "a state dict that another function makes": (
        "model = FSDP(net)\nwith FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):\n    save(model)",
        "in other functions",
    ),
    "a hook of communication": ("model = DDP(net)\nmodel.register_comm_hook(None, hook)", "reduce_dtype"),
    "a full state dict on one rank": (
        "model = DDP(net)\nif dist.get_rank() == 0:\n    torch.save(model.state_dict(), 'x')",
        "all ranks have to make a full state dict, found `dist.get_rank() == 0` around it",
    ),
    "a full state dict on the main process": (
        "model = DDP(net)\nif epoch % 2 == 0 and args.is_main_process:\n"
        "    if done:\n        torch.save(model.state_dict(), 'x')",
        "found `epoch % 2 == 0 and args.is_main_process` around it",
    ),
    "join": ("model = DDP(net)\nwith model.join():\n    pass", "fullshard.joined"),
    "gradients of full parameters": (
        "model = FSDP(net)\nwith FSDP.summon_full_params(model, with_grads=True):\n    pass",
        "full_tensor()",
    ),
    "a subclass that does more": (
        "class Mine(FSDP):\n    def extra(self): return 1\nmodel = Mine(net)",
        "move its methods",
    ),
    "the class as a value": ("register(FSDP)", "used as a value"),
    "wrap without its settings": ("from torch.distributed.fsdp.wrap import wrap\nx = wrap(net)", "enable_wrap"),
    "an unknown method": ("model = FSDP(net)\nFSDP.rekey_optim_state_dict(a, b, model)", "no counterpart"),
    "either of two": (
        "try:\n    from fairscale import Sharded as Wrap\nexcept ImportError:\n    Wrap = FSDP\nmodel = Wrap(net)",
        "may be torch's or another",
    ),
    "a model that cannot be followed": (
        "models = [FSDP(n) for n in nets]\nm = FSDP(net)\nfor x in models:\n    with x.no_sync(): pass",
        "was not found out",
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_what_is_not_sure_stays_as_it_is(name: str, tmp_path: Path) -> None:
    text, reason = BY_HAND[name]
    found = _migrated(tmp_path, HEAD + text + "\n")
    refused = [each for each in found.findings if each.verdict == UNSUPPORTED]
    assert any(reason in each.reason for each in refused), found.findings
    where = refused[-1].place.line
    for _, new in found.texts.values():
        assert (HEAD + text).splitlines()[where - 1] in new.splitlines()


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


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", names())
def test_every_program_is_converted_whole(name: str) -> None:
    """Nothing is left by hand, nothing of FSDP1 or DDP is left, and a second run finds nothing."""
    found = migrate_code(entry(name))
    assert not [each for each in found.findings if each.verdict == UNSUPPORTED]
    for old, new in found.texts.values():
        for word in (
            "FullyShardedDataParallel",
            "DistributedDataParallel",
            "ShardingStrategy",
            "torch.distributed.fsdp",
        ):
            assert word not in new.partition('"""\n')[2] or "optional" in name, word
        kept = [line for line in old.splitlines() if line.strip().startswith("#")]
        assert all(line.strip() in new for line in kept if "rank 0's are taken" not in line)


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
    (here / "a.py").write_text(f"{HEAD}model = FSDP(net, auto_wrap_policy=get())\n")
    assert main(["migrate", "a.py"]) == 1
    assert main(["migrate", "a.py", "--accept-lossy", "FullyShardedDataParallel", "--json"]) == 0
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


def test_a_missing_libcst_is_named(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "a.py").touch()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MigrationError, match="LibCST, which is not installed: pip install libcst"):
        migrate_code(here / "a.py")
