"""The walls between the rooms, each checked on the source as it is and on one that breaks it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import walk
from tests.harness import source as src
from tests.harness.source import Source

SOURCES = src.package_sources()

# Which rooms a room may import. "" is the public surface: `from fullshard import ...`. A room that is not here fails
# the test.
LOWER = frozenset({"layout", "schedule", "policy", "peers", "comm", "param", "_torch"})
ROOMS: dict[str, frozenset[str]] = {
    "_version": frozenset(),
    "_torch": frozenset(),
    "layout": frozenset(),
    "schedule": frozenset({"layout"}),
    "policy": frozenset({"layout", "_torch"}),
    # Knows neither units nor checkpoints: what ranks agree on comes as names and texts.
    "peers": frozenset({"_torch"}),
    "comm": frozenset({"layout", "policy", "peers", "_torch"}),
    "param": frozenset({"layout", "policy", "_torch"}),
    # Knows of the other ranks what `seam.py` says, and messages.
    "engine": LOWER - {"peers"},
    "agree": LOWER | {"engine"},
    "api": LOWER | {"engine", "agree"},
    "checkpoint": frozenset({"layout", "policy", "peers", "comm", "agree", "api", "_torch", "_version"}),
    # Reads records, with the rules' texts; the recorder writes what it reads.
    "see": frozenset({"schedule", "page"}),
    "observe": LOWER | {"engine", "plan", "see", "_version"},
    "extras": LOWER | {"engine", "agree", "api", "observe", "rounding"},
    "program": frozenset(),
    "rounding": frozenset(),
    "keys": frozenset(),
    "page": frozenset(),
    # Of `layout` how sequences are cut, for a plan of attention over parts of them.
    "migrate": frozenset(
        {"keys", "layout", "policy", "comm", "param", "engine", "api", "extras", "observe", "checkpoint", "program"}
        | {"_torch"}
    ),
    # Of `observe` only the mode that sees numbers taken of parts of sums; what is compared does not go through it.
    "verify": frozenset({"", "program", "rounding", "page", "checkpoint", "observe", "migrate"}),
    # Pure but for `facts`, which knows programs, and `tape` and its parts, which watch what torch dispatches.
    "plan": frozenset({"layout", "schedule", "program", "page", "_torch"}),
    # `--from` reads what `fullshard migrate` reads.
    "train": frozenset({"", "checkpoint", "program", "keys", "observe", "plan", "migrate"}),
    # Reads reports and layouts; the probe sends messages as the engine does, and writes to the store of checkpoints.
    "doctor": frozenset({"", "checkpoint", "program", "observe", "comm", "migrate", "_torch"}),
    "_public": frozenset({"agree", "api", "policy", "extras", "observe", "checkpoint", "program", "migrate"}),
    "compat": frozenset({"", "migrate", "checkpoint"}),
    "__init__": frozenset({"_version", "_public", "checkpoint", "extras", "observe"}),
    "cli": frozenset({"", "checkpoint", "doctor", "keys", "migrate", "plan", "program", "see", "train", "verify"}),
    "__main__": frozenset({"cli"}),
}
# Decided without torch, so that they run anywhere and in microseconds.
PURE = ("fullshard.layout", "fullshard.schedule", "fullshard.see") + tuple(
    f"fullshard.checkpoint.{name}" for name in "directory errors files manifest plan safetensors".split()
)
PURE += (
    "fullshard.keys",
    "fullshard.page",
    *(f"fullshard.migrate.{name}" for name in "axes config levels parallelism reading styles verdict".split()),
)
PURE += tuple(
    f"fullshard.plan.{name}" for name in "account checkpoints clock description machine page questions".split()
)
PURE += ("fullshard.plan.recomputation",)
PURE += tuple(
    f"fullshard.plan.{name}"
    for name in "moments pipeline reductions result rough search simulation spans stages strategy".split()
)
PURE += tuple(f"fullshard.peers.{name}" for name in "diagnosis scope store wait".split())
PURE += ("fullshard.agree.ledger", "fullshard.agree.differences")

# Beside _torch, which has its classes: where torch's FSDP2 is run.
FSDP_ALLOWED = {
    "verify/subject.py": "`fullshard verify --against torch` trains with it",
    "verify/former.py": "`fullshard migrate --prove` trains with FSDP1 and DDP",
    "compat/fsdp1_types.py": "enums, configs and policies of unchanged programs are torch's own",
}

# Beside the engine: who registers hooks.
HOOKS_ALLOWED = {
    "agree/guarded_steps.py": "ranks come together before an optimizer's step, for one block",
    "agree/recovery.py": "counts what is loaded after a device lost a model",
    "compat/fsdp1.py": "names of a state dict that is loaded, through a wrapper that is one level more",
    "extras/replay.py": "checksums of gradients before an optimizer's step, while a step is recorded",
    "migrate/pipeline_stages.py": "sees what comes into a stage of a pipeline, and what goes out",
    "migrate/relations.py": "compares what ranks give to a model, before its forward",
    "plan/graph_hooks.py": "sees on the meta device, where no unit is sharded, when the engine's hooks would report",
    "verify/weights.py": "for the cause of a difference: sees gradients of each rank independently of the engine",
}

# The rooms in which no two classes have one name: who follows a step passes through all of them.
NAMED_ONCE = ("layout", "schedule", "policy", "comm", "param", "peers", "engine", "agree")
# Names that users call, of classes of the engine's rooms.
ON_THE_SURFACE = frozenset({"replicate_names"})
MAX_LINES = 600
MAX_ATTRIBUTES = 15
# Files over the limit, each with the reason that a reader is asked to accept.
LONG_FILES: dict[str, str] = {}

# Private names of others that a file outside of _torch uses, each with its reason.
PRIVATE_ALLOWED: dict[tuple[str, str], str] = {
    ("program.py", "'_no_split_modules'"): "where Hugging Face's models name their blocks; torch has no such name",
    ("migrate/wrapping.py", "'_no_split_modules'"): "the same",
    ("migrate/wrapping.py", "'_fsdp_wrap'"): "a mark of Composer's on modules; torch has no such name",
    (
        "migrate/activations.py",
        "'_activation_checkpointing'",
    ): "a mark of Composer's on modules; torch has no such name",
    ("checkpoint/formats/pickle_tree.py", "._Unpickler"): "of Python's pickle: its reader with a table of opcodes",
    (
        "api/classes.py",
        "'_CAN_RECORD_REGISTRY'",
    ): "transformers: which outputs a class can record; torch has no such name",
    ("checkpoint/background.py", "._register_atexit"): "of Python's threading: what is called before executors stop",
    ("checkpoint/companions.py", "'_hf_peft_config_loaded'"): "transformers: adapters that it put in itself",
    ("checkpoint/formats/adapters.py", "._parameters"): "copies a module with other tensors, as torch's own copy does",
    ("checkpoint/formats/pretrained.py", "._weight_conversions"): "transformers: what save_pretrained undoes",
    ("checkpoint/formats/writings.py", "'_weight_conversions'"): "the same",
    ("checkpoint/formats/writings.py", "'_keys_to_ignore_on_save'"): "transformers: what its files leave out",
    ("compat/fsdp1.py", "'_module_classes_to_ignore'"): "a field of FSDP1's MixedPrecision, which users set",
    ("peers/store.py", "._current_frames"): "of Python's sys, documented; torch has no such name",
    ("param/swap.py", "._parameters"): "the one file that puts tensors on modules: setattr takes thirty times as long",
}


def _no_findings(findings: list[str]) -> None:
    assert not findings, "\n" + "\n".join(findings)


# ---- the source as it is -------------------------------------------------------------------------------------


@pytest.mark.parametrize("above", sorted({module.rpartition(".")[0] for module in PURE}))
def test_pure_rooms_import_without_torch(above: str) -> None:
    """In a fresh interpreter, every module of the rooms in one package; the packages above are stubs, because the real
    ones import torch.
    """
    rooms = tuple(f"{module}." for module in PURE if module.rpartition(".")[0] == above)
    names = [source.module for source in SOURCES if f"{source.module}.".startswith(rooms)]
    code = f"""
import importlib, sys, types
for name in ("fullshard", "fullshard.peers", {above!r}):
    stub = sys.modules.setdefault(name, types.ModuleType(name))
    stub.__path__ = [{str(src.SRC)!r} + "/" + name.replace(".", "/")]
for name in {names!r}:
    importlib.import_module(name)
    heavy = sorted({{"torch", "numpy"}} & set(sys.modules))
    assert not heavy, f"{{name}} imports {{heavy}}"
"""
    assert len(names) >= len(rooms)
    run = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr


def test_pure_rooms_name_no_torch() -> None:
    """Also inside functions, which an import of the module does not reach."""
    prefixes = tuple(f"{module}." for module in PURE)
    pure = [s for s in SOURCES if f"{s.module}.".startswith(prefixes)]
    assert pure
    _no_findings([finding for source in pure for finding in src.torch_imports(source)])


def test_rooms_import_only_what_lies_below() -> None:
    _no_findings([finding for source in SOURCES for finding in src.layering_violations(source, ROOMS)])


def test_the_picture_of_the_house_is_the_house() -> None:
    """CONTRIBUTING.md has all rooms, and each imports rooms of lower lines only."""
    text = (src.SRC.parent / "CONTRIBUTING.md").read_text()
    block = text[text.index("## Where things go") :].split("```text\n")[1].split("```")[0]
    floors = [re.match(r"(\w+)(?: {2,7}(\w+))?", line) for line in block.strip().splitlines()]
    floor_of = {room: number for number, found in enumerate(floors) if found for room in found.groups() if room}
    rooms = {path.parent.name if path.name == "__init__.py" else path.stem for path in _top_level()}
    assert floor_of.keys() == rooms - {"fullshard", "__main__", "_version"}
    upwards = [
        f"{source.name}: {room}"
        for source in SOURCES
        for room in [room or "_public" for _, room in src.imported_rooms(source)]
        if source.room in floor_of
        and room in floor_of
        and room != source.room
        and floor_of[room] <= floor_of[source.room]
    ]
    _no_findings(upwards)


def _top_level() -> list[Path]:
    package = src.SRC / "fullshard"
    return [*package.glob("*.py"), *package.glob("*/__init__.py")]


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports for types and inside functions too. A room's `__init__` hands names out, and is nobody's file."""
    package = src.SRC / "fullshard"
    files = [path for path in package.rglob("*.py") if path.name != "__init__.py"]
    names = {path: ".".join(path.relative_to(src.SRC).with_suffix("").parts) for path in files}
    imported = {name: walk.imports(package, path, names.values()) - {name} for path, name in names.items()}
    _no_findings([" <-> ".join(sorted(circle)) for circle in walk.circles(imported)])


def test_collectives_only_in_comm() -> None:
    own = src.defined_functions(source for source in SOURCES if source.room == "comm")
    others = [source for source in SOURCES if source.room != "comm"]
    _no_findings([finding for source in others for finding in src.collective_uses(source, own)])


def test_hooks_are_registered_only_in_the_engine() -> None:
    others = [source for source in SOURCES if source.room != "engine"]
    findings = [finding for source in others for finding in src.hook_registrations(source)]
    excused = {finding: file for finding in findings for file in HOOKS_ALLOWED if finding.startswith(f"{file}:")}
    _no_findings([finding for finding in findings if finding not in excused])
    assert set(HOOKS_ALLOWED) == set(excused.values())


def test_private_torch_names_only_in_the_compatibility_file() -> None:
    own = src.own_private_names(SOURCES)
    others = [source for source in SOURCES if source.room != "_torch"]
    findings = [finding for source in others for finding in src.private_torch_uses(source, own)]
    excused = {f: key for f in findings for key in PRIVATE_ALLOWED if f.startswith(key[0]) and f"{key[1]}," in f}
    _no_findings([finding for finding in findings if finding not in excused])
    stale = set(PRIVATE_ALLOWED) - set(excused.values())
    assert not stale, f"no longer needed, take them off the list: {stale}"


def test_torch_s_own_fsdp_is_named_only_in_the_compatibility_file() -> None:
    others = [source for source in SOURCES if source.room != "_torch" and source.name not in FSDP_ALLOWED]
    _no_findings([finding for source in others for finding in src.torch_fsdp_imports(source)])


def test_classes_have_few_attributes() -> None:
    """Else one has several owners, or is several things: docs/adr/0002."""
    found = [(source.name, name, n) for source in SOURCES for name, n in walk.attributes(source.text).items()]
    assert max(n for *_, n in found) > 10, "nothing is counted"
    _no_findings(
        [f"{file}: {name} has {n} attributes, over {MAX_ATTRIBUTES}" for file, name, n in found if n > MAX_ATTRIBUTES]
    )


def test_classes_of_the_engine_s_rooms_have_names_of_their_own() -> None:
    """An underscore makes no other name."""
    found: dict[str, list[str]] = {}
    for source in SOURCES:
        for node in ast.walk(source.tree) if source.room in NAMED_ONCE else ():
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name.lstrip("_"), []).append(source.name)
    assert len(found) > 50, "nothing is counted"
    _no_findings([f"{name}: {', '.join(files)}" for name, files in found.items() if len(files) > 1])


def test_each_function_of_the_engine_s_rooms_is_named_somewhere() -> None:
    """What nothing calls any more is read by everybody who looks for what does. Decorators may register a function."""
    # An `__init__` names functions only to hand them on.
    words = Counter(
        word
        for source in SOURCES
        if not source.name.endswith("__init__.py")
        for word in re.findall(r"\w+", source.text)
    )
    found = []
    for source in SOURCES:
        for node in ast.walk(source.tree) if source.room in (*NAMED_ONCE, "_torch") else ():
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("__"):
                found.append((words[node.name], source.name, node))
    assert len(found) > 1000, "nothing is counted"
    registered = {id(node) for _, _, node in found if any(isinstance(one, ast.Call) for one in node.decorator_list)}
    for_tests = {"known_in": "what names torch has is tested beside each torch that is installed"}
    _no_findings(
        [
            f"{file}: nothing names {node.name}; remove it"
            for times, file, node in found
            if times == 1 and id(node) not in registered and node.name not in {*for_tests, *ON_THE_SURFACE}
        ]
    )


def test_what_serves_ranks_agree_is_counted_where_it_is() -> None:
    """A file that is renamed must not leave the count; of another package there is none."""
    assert len(walk.agreeing(walk.PACKAGE)) > 20
    assert walk.agreeing(walk.FSDP2) == []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(walk, "AGREE", ("agree/*", "agree/nothing.py"))
        with pytest.raises(ValueError, match="expected files at agree/nothing.py"):
            walk.agreeing(walk.PACKAGE)


def test_files_can_be_read_in_one_sitting() -> None:
    lines = {source.name: source.text.count("\n") for source in SOURCES}
    _no_findings(
        [
            f"{name}: {n} lines, over {MAX_LINES}"
            for name, n in lines.items()
            if n > MAX_LINES and name not in LONG_FILES
        ]
    )
    stale = [name for name in LONG_FILES if lines.get(name, 0) <= MAX_LINES]
    assert not stale, f"no longer over {MAX_LINES} lines, take them off the list: {stale}"


# ---- sources that break a rule: each finder finds them -------------------------------------------------------

OWN = frozenset({"_ours"})
BREAKS: list[tuple[str, Callable[[Source], list[str]], str]] = [
    ("layout/a.py", src.torch_imports, "def f():\n    from torch.nn import Linear"),
    ("layout/a.py", src.torch_imports, "import torch.distributed as dist"),
    ("layout/a.py", lambda s: src.layering_violations(s, ROOMS), "from ..comm import gather"),
    ("layout/a.py", lambda s: src.layering_violations(s, ROOMS), "from .. import comm"),
    ("comm/a.py", lambda s: src.layering_violations(s, ROOMS), "import fullshard.engine.executor"),
    ("comm/__init__.py", lambda s: src.layering_violations(s, ROOMS), "from ..param.group import ParamGroup"),
    ("engine/a.py", lambda s: src.layering_violations(s, ROOMS), "from fullshard import fully_shard"),
    ("train/a.py", lambda s: src.layering_violations(s, ROOMS), "from fullshard.engine import root"),
    ("newroom/a.py", lambda s: src.layering_violations(s, ROOMS), "pass"),
    ("engine/a.py", src.collective_uses, "import torch.distributed as d\nd.all_reduce(x)"),
    ("engine/a.py", src.collective_uses, "import torch\nf = torch.distributed.reduce_scatter_tensor"),
    ("engine/a.py", src.collective_uses, "from torch.distributed import broadcast as b"),
    ("engine/a.py", src.collective_uses, "import torch.distributed._functional_collectives as funcol"),
    ("engine/a.py", src.collective_uses, "import torch\ntorch.ops._c10d_functional.all_reduce(x)"),
    ("engine/a.py", src.collective_uses, "mesh.get_group()._allgather_base(out, piece)"),
    ("engine/a.py", src.collective_uses, "group.alltoall_base(a, b, [], [])"),
    ("train/a.py", src.hook_registrations, "model.register_forward_hook(f)"),
    ("param/a.py", src.hook_registrations, "p.register_post_accumulate_grad_hook(f)"),
    (
        "observe/a.py",
        src.hook_registrations,
        "from torch.autograd.graph import register_multi_grad_hook as r\nregister_multi_grad_hook",
    ),
    ("api/a.py", lambda s: src.private_torch_uses(s, OWN), "import torch\ntorch._C._current_graph_task_id()"),
    ("api/a.py", lambda s: src.private_torch_uses(s, OWN), "from torch.nn import _reduction"),
    ("api/a.py", lambda s: src.private_torch_uses(s, OWN), "from torch._utils import x"),
    ("api/a.py", lambda s: src.private_torch_uses(s, OWN), "from torch import nn\nnn._ours"),
    ("api/a.py", lambda s: src.private_torch_uses(s, OWN), "param._local_tensor"),
    ("api/a.py", lambda s: src.private_torch_uses(s, OWN), "self._parameters['w'] = x"),
    ("api/a.py", lambda s: src.private_torch_uses(s, OWN), "getattr(param, '_spec')"),
    ("api/a.py", src.torch_fsdp_imports, "from torch.distributed.fsdp import fully_shard"),
    ("api/a.py", src.torch_fsdp_imports, "from torch.distributed import fsdp"),
    ("api/a.py", src.torch_fsdp_imports, "import torch.distributed.fsdp._fully_shard"),
    ("api/a.py", src.torch_fsdp_imports, "import torch\ntorch.distributed.fsdp.FSDPModule"),
]


@pytest.mark.parametrize(("name", "finder", "text"), BREAKS, ids=[f"{name}-{text[:40]!r}" for name, _, text in BREAKS])
def test_a_broken_rule_is_found(name: str, finder: Callable[[Source], list[str]], text: str) -> None:
    findings = finder(Source(name, text))
    assert findings and all(finding.startswith(f"{name}:") for finding in findings)


ALLOWED: list[tuple[str, Callable[[Source], list[str]], str]] = [
    (
        "schedule/a.py",
        lambda s: src.layering_violations(s, ROOMS),
        "from ..layout import shard\nfrom .events import Event",
    ),
    (
        "train/a.py",
        lambda s: src.layering_violations(s, ROOMS),
        "from fullshard import fully_shard\nimport fullshard.train.loop",
    ),
    ("engine/a.py", src.collective_uses, "import torch\nx.gather(0, i)\ntorch.gather(x, 0, i)\nself.comm.reduce(x)"),
    ("engine/a.py", lambda s: src.collective_uses(s, frozenset({"reduce_scatter"})), "self.comm.reduce_scatter(x)"),
    ("train/a.py", src.hook_registrations, "def register_reader(name): ..."),
    (
        "api/a.py",
        lambda s: src.private_torch_uses(s, OWN),
        "unit._ours\nself.__dict__\nx._replace(a=1)\ngetattr(m, '_ours')",
    ),
    ("api/a.py", src.torch_fsdp_imports, "from torch.distributed.device_mesh import DeviceMesh"),
]


@pytest.mark.parametrize(
    ("name", "finder", "text"), ALLOWED, ids=[f"{name}-{text[:40]!r}" for name, _, text in ALLOWED]
)
def test_what_is_allowed_is_not_found(name: str, finder: Callable[[Source], list[str]], text: str) -> None:
    _no_findings(finder(Source(name, text)))
