"""`fullshard doctor`: each check finds what is planted for it, and nothing in what is sound."""

from __future__ import annotations

import json
import re
import socket
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fullshard import Program, cli
from fullshard.doctor import CHECKS, checks, diagnosis, machine, model
from fullshard.doctor.facts import Axis, Facts, Folder, Machine, Measured
from fullshard.program import ProgramError

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
HEALTHY = Machine("2.13.0", "0.2", "0.2", frozenset({"gloo", "nccl"}), 8, 16, "", "", 29500, True, 1 << 33, 65536)


def blocks(count: int = 3, width: int = 32, **options: Any) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width, **options) for _ in range(count)))


def program(build: Callable[[], nn.Module] = blocks, **options: Any) -> Program:
    given: dict[str, Any] = {"loss": lambda net, x: net(x).square().mean(), "batch": lambda i: torch.ones(4, 32)}
    return Program(build, **{**given, **options})


def facts_of(asked: Program, world: int = 2, steps: bool = False) -> Facts:
    found, measured = model.look(asked, world, 1, {}, steps=steps)
    return Facts(world, 1, HEALTHY, found, None, measured)


def found_in(facts: Facts) -> dict[str, str]:
    return {finding.check: finding.what for finding in diagnosis.diagnose(facts).findings}


@pytest.fixture(scope="module")
def sound() -> Facts:
    """Of a model without a fault, large enough to be asked about times: 64 MiB of four blocks on the meta device."""
    facts = facts_of(program(lambda: blocks(4, 2048, device="meta")))
    assert set(found_in(facts)) == {"meta"}
    return replace(facts, model=replace(facts.model, meta=()))


def test_a_clean_model_has_no_findings() -> None:
    """Its step is taken plain and sharded, and both are timed."""
    facts = facts_of(program(), steps=True)
    assert found_in(facts) == {}
    assert facts.measured.step and facts.measured.host is not None and facts.measured.skipped == ()
    assert facts.model.gathers == (1, 2, 2, 2)  # the root, first, holds nothing


# ---- of the model, planted in a model --------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks()
        self.head = nn.Linear(32, 32, bias=False)
        self.head.weight = self.blocks[1].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))  # type: ignore[no-any-return]


class Counting(nn.Sequential):
    """A running mean that no state dict has, and a constant."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(*blocks())
        self.register_buffer("seen", torch.zeros(1, device=device), persistent=False)
        self.register_buffer("constant", torch.ones(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return super().forward(x)


def _frozen() -> nn.Module:
    net = blocks()
    net[1].bias.requires_grad_(False)
    return net


def _mixed() -> nn.Module:
    net = blocks()
    net[1].bias = nn.Parameter(net[1].bias.detach().bfloat16())
    return net


def _empty() -> nn.Module:
    net = blocks()
    net[2].weight = nn.Parameter(torch.empty(32, 32))
    return net


def _old_optimizer() -> Program:
    net = blocks()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return program(lambda: net, optimizer=lambda _: optimizer)


def _only_the_model(net: nn.Module, fully_shard: Any) -> None:
    fully_shard(net)


def _first_block(net: Any, fully_shard: Any) -> None:
    fully_shard(net[0])


def _each(net: Any, fully_shard: Any) -> None:
    for child in net:
        fully_shard(child)
    fully_shard(net)


def _blocks(net: Any, fully_shard: Any) -> None:
    """Each of them a unit, also the one that shares a weight with the head: default units leave it out."""
    for block in net.blocks:
        fully_shard(block)
    fully_shard(net)


def meta(*widths: tuple[int, int]) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b, bias=False, device="meta") for a, b in widths))


# name -> the program, the world, whether a step is taken, and what is said.
MODELS: dict[str, tuple[Callable[[], Program], int, bool, str]] = {
    "step": (lambda: program(batch=lambda i: torch.ones(4, 3)), 2, True, "batch 0: RuntimeError"),
    "refused": (lambda: program(shard=lambda net, f: f(net, reshard_after_forward="no")), 2, False, "reshard_after"),
    "nothing-sharded": (lambda: program(shard=lambda net, f: None), 2, False, "no module"),
    "unsharded": (lambda: program(shard=_first_block), 2, False, "1.weight, 1.bias, 2.weight, 2.bias"),
    "ties": (lambda: program(Tied, shard=_blocks), 2, False, "blocks.1.weight (unit blocks.1) = head.weight (unit "),
    "root": (lambda: program(lambda: blocks(4, 2048, device="meta"), shard=_only_the_model), 2, False, "root holds"),
    "large-unit": (lambda: program(lambda: meta((9000, 8000), (9, 9)), shard=_each), 2, False, "unit 0 has 274.7 MiB"),
    "small-units": (
        lambda: program(lambda: meta((4096, 4096), *[(9, 9)] * 4), shard=_each), 2, False, "4 units are under 1 MiB",
    ),
    "padding": (lambda: program(lambda: meta((4096, 9), (9, 9)), shard=_each), 256, False, "unit 0 on 256 ranks"),
    "dtypes": (lambda: program(_mixed), 2, False, "unit 1 has parameters in"),
    "frozen": (lambda: program(_frozen), 2, False, "unit 1: 1 of 2"),
    "meta": (lambda: program(lambda: blocks(device="meta")), 2, True, "0.weight, 0.bias, 1.weight, 1.bias and 2 more"),
    "uninitialised": (lambda: program(_empty), 2, False, "2.weight"),
    "meta-buffers": (lambda: program(lambda: Counting("meta")), 2, True, "device: seen"),
    "changed-buffers": (lambda: program(Counting), 2, True, "by a step: seen"),
    "optimizer-order": (_old_optimizer, 2, False, "holds 6 tensors"),
    "optimizer-misses": (
        lambda: program(optimizer=lambda given: torch.optim.SGD(list(given)[:-1])), 2, False, "optimizer: 2.bias",
    ),
}  # fmt: skip


@pytest.mark.sample(9)
@pytest.mark.parametrize("name", MODELS)
def test_what_is_planted_in_a_model_is_found_alone(name: str) -> None:
    build, world, steps, said = MODELS[name]
    found = found_in(facts_of(build(), world, steps))
    on_meta = {"meta"} if name in ("root", "large-unit", "small-units", "padding") else set()
    assert found.keys() == {name} | on_meta, found
    assert said in found[name], found[name]


def test_what_is_ignored_on_purpose_and_lazy_modules() -> None:
    def ignoring(net: Any, fully_shard: Any) -> None:
        fully_shard(net, ignored_params={net[0].weight})

    assert found_in(facts_of(program(shard=ignoring))) == {}
    found = found_in(facts_of(program(lambda: nn.Sequential(nn.LazyLinear(8))), steps=True))
    assert "0.weight" in found["uninitialised"] and found.keys() <= {"uninitialised", "refused"}


def test_ties_inside_a_unit_are_sound() -> None:
    def together(net: Any, fully_shard: Any) -> None:
        fully_shard([net.blocks[1], net.head])
        fully_shard(net)

    assert found_in(facts_of(program(Tied, shard=together))) == {}
    assert found_in(facts_of(program(Tied, shard=_only_the_model))) == {}


def test_padding_depends_on_the_world() -> None:
    asked = [facts_of(program(lambda: meta((4096, 512)), shard=_each), world) for world in (512, 1024, 3000)]
    assert ["padding" in found_in(facts) for facts in asked] == [False, True, True]


def test_a_model_that_cannot_be_built_is_one_line() -> None:
    with pytest.raises(ProgramError, match=r"^the model cannot be built: ZeroDivisionError: division by zero$"):
        facts_of(program(lambda: 1 / 0))  # type: ignore[arg-type, return-value]
    with pytest.raises(ProgramError, match="found a int"):
        facts_of(program(lambda: 1))  # type: ignore[arg-type, return-value]
    with pytest.raises(ProgramError, match="^the optimizer cannot be built: TypeError"):
        facts_of(program(optimizer=lambda: None))


# ---- of the rest, planted in the facts -------------------------------------------------------------------------------


def _axes(shard: float, replicate: float) -> tuple[Axis, ...]:
    return Axis("shard", 2, shard, shard), Axis("replicate", 2, replicate, replicate)


HERE = Folder("/runs", "", 1 << 40, "ext4", 1 << 30)
SOUND_FACTS: list[dict[str, Any]] = [
    {},
    {"folder": HERE},
    {"folder": replace(HERE, file_system="nfs4"), "world": 64},
    {"measured": Measured(step=10.0, host=0.1, axes=_axes(1e9, 1e9))},
]
# name -> what is replaced in the sound facts; of a part of them as "part.field".
FACTS: dict[str, dict[str, Any]] = {
    "torch-old": {"machine.torch": "2.9.1+cpu"},
    "torch-new": {"machine.torch": "2.16.0"},
    "two-versions": {"machine.installed": "0.1"},
    "backend": {"machine.backends": frozenset({"gloo"})},
    "network": {"machine.loopback": "127.0.0.1: refused"},
    "port": {"machine.port_is_free": False},
    "shared-memory": {"machine.shared_memory": 64 * MIB},
    "open-files": {"machine.open_files": 1024, "world": 1000},
    "checkpoints": {"folder": replace(HERE, problem="/runs: Permission denied")},
    "checkpoint-space": {"folder": replace(HERE, free=1 << 29)},
    "checkpoint-memory": {"folder": replace(HERE, file_system="tmpfs")},
    "checkpoint-shared": {"folder": HERE, "world": 64},
    "processes": {"measured": Measured(failure="Connection refused")},
    "slow-axis": {"measured": Measured(step=10.0, axes=_axes(1e8, 1e9))},
    "host-bound": {"measured": Measured(step=0.1, host=0.1)},
    "communication-bound": {"measured": Measured(step=0.01, axes=_axes(1e9, 1e9))},
}


def changed(facts: Facts, changes: dict[str, Any]) -> Facts:
    for name, value in changes.items():
        part, _, inner = name.partition(".")
        facts = replace(facts, **{part: replace(getattr(facts, part), **{inner: value}) if inner else value})
    return facts


@pytest.mark.parametrize("name", FACTS)
def test_what_is_planted_in_the_facts_is_found_alone(name: str, sound: Facts) -> None:
    (found,) = diagnosis.diagnose(changed(sound, FACTS[name])).findings
    check = next(check for check in CHECKS if check.name == name)
    assert (found.check, found.severity, found.why, found.fix) == (name, check.severity, check.why, check.fix)


@pytest.mark.parametrize("changes", SOUND_FACTS)
def test_sound_facts_have_no_findings(changes: dict[str, Any], sound: Facts) -> None:
    assert found_in(changed(sound, changes)) == {}


def test_seconds_of_messages_are_bytes_over_bandwidth(sound: Facts) -> None:
    """Each of four units of 2048 x 2049 is gathered twice and reduced once, half of it from the other rank."""
    moved = 4 * 2048 * 2049 // 2 * 4 * 3
    taken = checks.messages(changed(sound, {"measured": Measured(axes=_axes(1e9, 1e9))}))
    assert taken == pytest.approx(moved / 1e9, rel=1e-3)


def test_every_check_is_planted_documented_and_says_why() -> None:
    from tests.fake.test_doctor_axes import PLANTED as OF_AXES
    from tests.fake.test_doctor_steps import PLANTED

    names = [check.name for check in CHECKS]
    assert sorted(names) == sorted([*MODELS, *FACTS, *PLANTED, *OF_AXES])
    assert all(len(cases) >= 3 for cases in PLANTED.values())
    text = (ROOT / "docs" / "doctor.md").read_text()
    assert re.findall(r"^\| `([\w-]+)` \| (\w+) \|", text, flags=re.M) == [(c.name, c.severity) for c in CHECKS]
    assert all(check.why and check.fix for check in CHECKS)


def test_the_exit_code_is_that_of_the_worst(sound: Facts) -> None:
    codes = [diagnosis.diagnose(changed(sound, FACTS[name])).exit_code for name in ("torch-new", "port", "backend")]
    assert codes == [0, 1, 2]
    both = diagnosis.diagnose(changed(sound, FACTS["torch-new"] | FACTS["backend"]))
    assert [finding.severity for finding in both.findings] == ["error", "advice"]
    assert "1 error, 0 warnings, 1 advice" in str(both) and "fix: install a torch" in str(both)


# ---- the machine and the folder as they are --------------------------------------------------------------------------


def test_the_supported_versions_are_those_of_the_package() -> None:
    (needed,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    after = (machine.NEWEST[0], machine.NEWEST[1] + 1)
    assert needed == f"torch<{checks._dotted(after)},>={checks._dotted(machine.OLDEST)}"
    pinned = re.search(r"^torch==([\w.]+)", (ROOT / "constraints.txt").read_text(), flags=re.M)
    assert pinned and machine.OLDEST <= machine.version_of(pinned[1]) <= machine.NEWEST


def test_a_port_in_use_and_a_missing_interface_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as server:
        monkeypatch.setenv("MASTER_PORT", str(server.getsockname()[1]))
        here = machine.look(needs_port=True)
        assert not here.port_is_free and machine.look(needs_port=False).port_is_free
    assert machine.look(needs_port=True).port_is_free
    assert here.loopback == here.interface == "" and "gloo" in here.backends and here.torch == torch.__version__
    monkeypatch.setenv("MASTER_PORT", "http")
    with pytest.raises(ProgramError, match="MASTER_PORT = http: expected a number from 0 to 65535"):
        machine.look(needs_port=True)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    assert "names nowhere0; there are" in machine.look(needs_port=False).interface


def test_a_folder_is_looked_at_and_left_as_it_was(tmp_path: Path) -> None:
    there = machine.look_at_folder(tmp_path / "a" / "b", 5)
    assert there.problem == "" and there.free > 0 and there.needed == 5 and list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("x")
    assert "Not a directory" in machine.look_at_folder(tmp_path / "file" / "run", 5).problem
    if Path("/dev/shm").is_dir():
        assert machine.look_at_folder(Path("/dev/shm/run"), 5).file_system == "tmpfs"


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wide.toml").write_text('[run]\ndir = "/dev/null/run"\n[sharding.precision]\nparam = "bfloat16"\n')
    (tmp_path / "wrong.toml").write_text("[model]\nheads = 3\n")
    yield tmp_path


def test_the_config_s_folder_replicas_and_dtypes_are_looked_at(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Facts] = []
    # The name of the module is that of its function in the room.
    monkeypatch.setattr(
        sys.modules["fullshard.doctor.examine"],
        "diagnose",
        lambda facts: seen.append(facts) or diagnosis.diagnose(facts),
    )
    assert cli.main(["doctor", "wide.toml", "--nproc", "4", "--replicas", "2", "--no-probe"]) == 2
    out = capsys.readouterr().out
    assert "error    checkpoints: /dev/null/run cannot be written" in out and "not measured: a step (--no-probe)" in out
    (facts,) = seen
    assert facts.model.report is not None and facts.machine.port == 0
    assert {unit.world for unit in facts.model.report.units} == {2}
    assert {unit.compute_dtypes for unit in facts.model.report.units} == {("bfloat16",)}
    # AdamW: parameters and two moments in float32, three checkpoints of them, and a few counters.
    whole = sum(unit.numel for unit in facts.model.report.units) * 12 * 3
    assert facts.folder is not None and whole <= facts.folder.needed < 1.1 * whole


def test_a_program_s_folder_is_an_option(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_PORT", "0")
    command = ["doctor", "tests.fake.test_doctor:program", "--no-probe", "--json"]
    cli.main(command)
    assert json.loads(capsys.readouterr().out)["checkpoints"] is None
    assert cli.main([*command, "--checkpoints", "/dev/null/x"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["checkpoints"]["path"] == "/dev/null/x" and found["exit_code"] == 2
    assert "checkpoints" in [finding["check"] for finding in found["findings"]]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("not_here:program",), "found no module not_here"),
        (("no.toml",), "no.toml"),
        (("wrong.toml",), "model.heads = 3"),
        (("wide.toml", "--nproc", "3", "--replicas", "2"), "data_parallel_replicate_degree = 2"),
        (("tests.fake.test_doctor:program", "--nproc", "3", "--replicas", "2"), "divides the 3 ranks"),
        (("wide.toml", "--nproc", "0"), "--nproc 0: expected at least 1"),
    ],
)
def test_what_cannot_be_looked_at_is_said_in_one_line(
    arguments: tuple[str, ...], said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", *arguments]) == 2
    err = capsys.readouterr().err
    assert said in err and len(err.splitlines()) == 1, err
