"""`fullshard plan`: sources, output, exit codes; and the planner's commands and messages beside the engine's."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fullshard import MixedPrecisionPolicy, Program
from fullshard.cli import main
from fullshard.doctor import calibration
from fullshard.plan import Strategy
from fullshard.plan.comparison import machine_file
from fullshard.plan.facts import describe, measured_device
from fullshard.plan.machine import find_hardware
from fullshard.program import OwnDtype, ProgramError, modules_of
from fullshard.see.record import Header, Unit, file_name, header_fields, line
from fullshard.train import shapes
from fullshard.train.config import load_config
from fullshard.train.planned import strategy_of
from tests.harness.planned import MODELS, count, predict

_KEYS = {
    "fits",
    "peak_bytes",
    "terms",
    "bytes_sent",
    "step_seconds",
    "assumptions",
    "largest",
    "phases",
    "units",
    "padding",
    "exposed_seconds",
    "mfu",
    "tokens_per_second",
    "checkpoint",
    "changes",
}


def program() -> Program:
    """An entry point: a chain whose blocks are units."""
    model = MODELS["mlp"]
    return model.program(4)


def needs_values() -> Program:
    """A model that reads a value."""
    return replace(program(), loss=lambda model, batch: model(batch[0]).sum() * float(batch[0].sum() > 0))


class _Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        raise RuntimeError("no such file\nsecond line")


def cannot_be_built() -> Program:
    return replace(program(), model=_Fails)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("llama", Strategy(ranks=4, compute="bfloat16", reduce="float32")),
        ("transformer, nested units", Strategy(ranks=2, reshard=False)),
        ("mlp", Strategy(ranks=4, replicas=2)),
        ("frozen base", Strategy(ranks=2)),
        ("mlp", Strategy(ranks=4, reshard=2)),
        ("llama, tied", Strategy(ranks=2, accumulate=2)),
        ("mlp, norms in float32", Strategy(ranks=4, compute="bfloat16", reduce="float32")),
        ("convolutions, batch norm in float32", Strategy(ranks=2, compute="bfloat16", accumulate=2)),
    ],
)
def test_commands_and_messages_are_those_of_the_engine(name: str, strategy: Strategy) -> None:
    strategy = replace(strategy, backend="fake")
    counted, simulation = count(MODELS[name], strategy, 2, trace=True), predict(MODELS[name], strategy, 2)
    assert simulation.found.commands == counted.commands
    # What a rank sends of a message: all but its own part. A sum over replicas goes around twice.
    traffic = simulation.found.traffic
    block = traffic["block"].nbytes
    gathered, shard, replicas = counted.messages.get("all-gather", 0), strategy.shard, strategy.replicas
    if block:
        whole = block * int(strategy.reshard) / (int(strategy.reshard) - 1)
        gathered -= int(whole)
    sent = (gathered + counted.messages.get("all-to-all", 0)) * (shard - 1) / shard
    assert traffic["shard"].nbytes == sent
    # Beside the gradients, a few bytes by which replicas compare facts.
    summed = traffic["replicate"].nbytes / (2 * (replicas - 1) / replicas) if replicas > 1 else 0
    assert 0 <= counted.messages.get("all-reduce", 0) - summed <= 128


@pytest.mark.slow
def test_what_a_host_sends_is_printed_in_both_ways(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """By hand: gathers and gradients of what four ranks share, on two hosts."""
    slow, fast = tmp_path / "slow.toml", tmp_path / "fast.toml"
    slow.write_text('base = "cpu"\ninter_node = 62.5e6\n')  # 1 Gbit/s for two ranks
    fast.write_text('base = "cpu"\ninter_node = 6e9\n')

    def planned(*more: str, hardware: Path = slow) -> dict[str, float]:
        ask = ["plan", f"{__name__}:program", "--ranks", "4", "--hardware", str(hardware), "--hosts", "2", *more]
        assert main([*ask, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        # Each rank sends 3/4 of every message.
        return {
            way: n / (found["bytes_sent"].get("shard", 0) * 4 / 3) for way, n in found["bytes_sent_by_host"].items()
        }

    both = planned()
    # The way of the plan is the first; of a message a host sends half in two levels, all from rank to rank, and three
    # quarters around a ring, as packed gathers go.
    assert list(both) == ["two levels", "one level"] and both["two levels"] == 0.5 and 0.75 < both["one level"] <= 1
    assert list(planned(hardware=fast)) == ["one level", "two levels"] and planned(hardware=fast) == both
    assert list(planned("--one-level")) == ["one level", "two levels"] == list(planned("--one-level", hardware=fast))
    assert list(planned("--two-levels", hardware=fast)) == ["two levels", "one level"]
    mixed = planned(hardware=Path("cpu"))
    assert next(iter(mixed)) == "one level, gathers around a ring" and mixed.keys() > both.keys()
    ask = ["plan", f"{__name__}:program", "--ranks", "4", "--hardware", str(slow), "--hosts", "2"]
    assert main(ask) == 0
    assert " in two levels or " in capsys.readouterr().out.partition("between 2 hosts: each sends")[2]
    assert main([*ask, "--replicas", "2", "--json"]) == 0
    replicated = json.loads(capsys.readouterr().out)
    assert replicated["bytes_sent_by_host"] == {"one level": 2 * replicated["bytes_sent"]["replicate"]}
    assert main([*ask, "--hosts", "3"]) == 2 and "divides the 4 ranks" in capsys.readouterr().err
    with pytest.raises(ValueError, match="hosts: expected data parallelism alone, found ZeRO-3, TP 2"):
        Strategy(ranks=4, tensor=2, hosts=2)
    assert main([*ask, "--optimizer", "muon"]) == 2 and "sends nothing, found muon" in capsys.readouterr().err
    for option in ("--one-level", "--two-levels"):
        assert main([*ask[:-2], option]) == 2 and f"{option}: expected --hosts" in capsys.readouterr().err


def test_json_has_what_is_documented(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    entry = f"{__name__}:program"
    page, picture = tmp_path / "plan.html", tmp_path / "plan.svg"
    code = main(["plan", entry, "--ranks", "4", "--micro", "4", "--json", "--html", str(page), "--svg", str(picture)])
    found = json.loads(capsys.readouterr().out)
    assert code == 0 and found["fits"] and _KEYS <= found.keys()
    documented = Path(__file__).parents[2].joinpath("docs/plan.md").read_text()
    assert all(f"`{key}`" in documented for key in found), "docs/plan.md names every key"
    assert page.read_text().startswith("<!doctype html>") and picture.read_text().startswith("<svg")
    assert found["strategy"]["param_dtype"] == "bfloat16" and found["strategy"]["ranks"] == 4


def test_the_micro_batch_is_the_programs_own(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for given in ([], ["--micro", "4"], ["--batch", "8"], ["--micro", "2", "--batch", "8"]):
        assert main(["plan", f"{__name__}:program", "--json", *given]) == 0
        strategy = json.loads(capsys.readouterr().out)["strategy"]
        found.append((strategy["micro_batch"], strategy["accumulate"]))
    assert found == [(4, 1), (4, 1), (4, 2), (2, 4)]


def test_another_micro_batch_of_a_config_has_the_same_samples(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "train.toml"
    file.write_text("[training]\nglobal_batch = 16\nmicro_batch = 2\n[model]\nlayers = 1\n")
    asked, found = ["plan", str(file), "--ranks", "2", "--hardware", "cpu"], []
    for given in ([], ["--micro", "1"], ["--micro", "8"], ["--micro", "2", "--batch", "4"], ["--batch", "4"]):
        assert main([*asked, *given, "--json"]) == 0
        strategy = json.loads(capsys.readouterr().out)["strategy"]
        found.append((strategy["micro_batch"], strategy["accumulate"]))
    assert found == [(2, 4), (1, 8), (8, 1), (2, 2), (2, 2)]
    assert main([*asked, "--micro", "3"]) == 2
    assert "--micro 3: expected a divisor of the 8 samples that a rank has in a step" in capsys.readouterr().err


@pytest.mark.parametrize(
    "asked",
    [
        ["plan", f"{__name__}:program", "--ranks", "2", "--hardware", "cpu"],
        ["plan", f"{__name__}:program", "--ranks", "2", "--hardware", "cpu", "--explain", "peak"],
        ["see", "RUN", "--unit", ""],
        ["completion", "bash"],
    ],
    ids=" ".join,
)
def test_a_command_whose_reader_is_gone_ends_without_a_word(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = _run(tmp_path / "run", [2.0, 0.1])
    _recorded(run)
    reading, writing = os.pipe()
    os.close(reading)
    # Line by line and all at the end: a write fails, or the last flush.
    for buffering in (1, -1):
        with os.fdopen(os.dup(writing), "w", buffering=buffering) as pipe, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", pipe)
            assert main([str(run) if word == "RUN" else word for word in asked]) == 1
    os.close(writing)
    assert not capsys.readouterr().err


def norms_kept() -> Program:
    """Its own `shard` says which parameters keep their dtype."""

    def shard(model: nn.Module, fully_shard: Any) -> None:
        policy = MixedPrecisionPolicy(
            torch.bfloat16, param_dtype_override_fn=OwnDtype(modules_of(model, ["LayerNorm"]))
        )
        for name in MODELS["mlp"].units:
            fully_shard(model.get_submodule(name), mp_policy=policy)
        fully_shard(model)

    return replace(program(), shard=shard)


@pytest.mark.slow
def test_modules_in_float32(capsys: pytest.CaptureFixture[str]) -> None:
    """By their class, and by the program's own policy: the same plan, of two all-gathers for a block."""
    found = []
    for entry, keep in (("program", []), ("program", ["--keep-float32", "LayerNorm"]), ("norms_kept", [])):
        assert main(["plan", f"{__name__}:{entry}", "--ranks", "4", "--json", *keep]) == 0
        found.append(json.loads(capsys.readouterr().out))
    plain, by_class, by_policy = found
    assert by_class["bytes_sent"] == by_policy["bytes_sent"] and by_class["peak_bytes"] == by_policy["peak_bytes"]
    assert by_class["bytes_sent"] != plain["bytes_sent"]
    assert main(["plan", f"{__name__}:program", "--keep-float32", "LayerNorm, BatchNorm"]) == 0
    assert "bfloat16, 6 parameters (576 elements) in their own dtype" in capsys.readouterr().out
    assert main(["plan", f"{__name__}:program", "--keep-float32", "LayrNorm"]) == 2
    assert "expected names of classes of its modules, found 'LayrNorm'" in capsys.readouterr().err


@pytest.mark.slow
def test_what_does_not_fit_says_on_how_many_devices_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    entry = ["plan", f"{__name__}:program", "--hardware", "cpu"]
    assert main([*entry, "--ranks", "5", "--json"]) == 0
    needed = json.loads(capsys.readouterr().out)["peak_bytes"]
    entry += ["--budget", str((needed + 1) / 1e9)]
    assert main([*entry, "--ranks", "2", "--json"]) == 1
    least = json.loads(capsys.readouterr().out)["least_ranks"]
    assert 2 < least <= 5 and [main([*entry, "--ranks", str(n)]) for n in (least - 1, least)] == [1, 0]
    assert f"as asked for it fits on {least} devices and on no fewer: peak " in capsys.readouterr().out
    assert main([*entry[:-1], "0.0001", "--ranks", "2"]) == 1
    assert "as asked for it fits on no number of devices" in capsys.readouterr().out


@pytest.mark.slow
def test_a_search_says_on_a_terminal_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = ["plan", f"{__name__}:program", "--hardware", "cpu", "--ranks", "2", "--search"]
    assert main(entry) == 0 and capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(entry) == 0
    said = capsys.readouterr().err
    assert "data parallelism: the model" in said and " tried, " in said and said.endswith("\r\x1b[K")


@pytest.mark.slow
def test_what_does_not_fit_says_what_does(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    entry = ["plan", f"{__name__}:program", "--ranks", "2", "--micro", "64"]
    assert main([*entry, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    needed, margin = found["peak_bytes"], found["margin_bytes"]
    assert margin == pytest.approx(0.05 * needed, abs=1)
    assert main([*entry, "--budget", str((needed + margin - 10) / 1e9)]) == 1
    assert "to spare are less than the margin of 5%" in capsys.readouterr().out
    # Of so small a model the margin would be more than all that changes save.
    exact = tmp_path / "exact.toml"
    exact.write_text('base = "h100-80g"\nmargin = 0.0\n')
    entry += ["--hardware", str(exact)]
    assert main([*entry, "--budget", str((needed - 1) / 1e9)]) == 1
    said = capsys.readouterr().out
    assert "does not fit: peak" in said and "the cheapest changes that fit" in said
    assert "micro-batch" in said.partition("the cheapest changes")[2] or "recompute" in said
    assert main([*entry, "--budget", "0.001"]) == 1
    assert "nothing that was tried fits" in capsys.readouterr().out


@pytest.mark.slow
def test_a_config_of_the_trainer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "train.toml"
    file.write_text(
        '[training]\nglobal_batch = 16\nmicro_batch = 2\n[sharding]\nactivation_checkpointing = "units"\n'
        'precision.param = "bfloat16"\n'
    )
    load_config(file)
    assert main(["plan", str(file), "--ranks", "4", "--hardware", "cpu", "--json"]) == 0
    strategy = json.loads(capsys.readouterr().out)["strategy"]
    assert (strategy["micro_batch"], strategy["accumulate"]) == (2, 2)
    assert (strategy["recompute"], strategy["param_dtype"], strategy["reduce_dtype"]) == ("whole", "bfloat16", None)
    assert main(["plan", str(file), "--ranks", "4", "--hardware", "cpu", "--rough", "--assumptions"]) == 0
    said = capsys.readouterr().out
    assert "102.5 GB: does not fit in 80 GB either" in said and "assumed" in said
    assert main(["plan", str(file), "--ranks", "4", "--hardware", "cpu", "--explain", "recompute"]) == 0
    said = capsys.readouterr().out
    assert all(f"recompute {way}" in said for way in ("none", "selective", "alternate", "whole"))
    # The command line, which does not name it, leaves what the config puts on the host.
    file.write_text(file.read_text() + "cpu_offload = true\n")
    assert main(["plan", str(file), "--ranks", "4", "--hardware", "h100-80g", "--offload-activations", "--json"]) == 0
    strategy = json.loads(capsys.readouterr().out)["strategy"]
    assert (strategy["offload"], strategy["recompute"], strategy["offload_activations"]) == (True, "whole", True)


def test_what_the_trainer_saves_is_what_the_planner_keeps(tmp_path: Path) -> None:
    file = tmp_path / "train.toml"
    file.write_text('[sharding.activation_checkpointing]\nat = "units"\nsave = ["aten.mm", "aten.bmm.default"]\n')
    assert strategy_of(load_config(file), 1, "gloo").recompute == "keep:aten.mm,aten.bmm.default"


_LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}


def test_a_config_of_hugging_face_without_transformers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(_LLAMA))
    monkeypatch.setitem(sys.modules, "transformers", None)
    model = describe(shapes.hugging_face(file), "llama")
    block = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32
    assert model.numel == 2 * 100 * 32 + 2 * block + 32
    assert [unit.title for unit in model.units] == ["root", "layers.0", "layers.1"]
    assert (model.samples, model.tokens, model.attention) == (1, 64, (64, 2, 32))
    file.write_text(json.dumps(_LLAMA | {"model_type": "mamba"}))
    with pytest.raises(ProgramError, match="a mamba needs the package transformers"):
        shapes.hugging_face(file)
    for key in ("attention_bias", "mlp_bias"):
        file.write_text(json.dumps(_LLAMA | {key: True}))
        with pytest.raises(ProgramError, match=f"a llama with {key} needs the package transformers"):
            shapes.hugging_face(file)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_config_without_a_key_has_the_default_of_its_class(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    file, sizes = tmp_path / "config.json", {"num_attention_heads": 16, "hidden_size": 64, "head_dim": 4}
    told = {key: value for key, value in _LLAMA.items() if key != "num_key_value_heads"} | sizes
    file.write_text(json.dumps(told | {"model_type": kind}))
    with_transformers = describe(shapes.hugging_face(file), kind).numel
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert describe(shapes.hugging_face(file), kind).numel == with_transformers


_SMALL = {"vocab_size": 100, "tie_word_embeddings": False}
_DECODERS = {
    "llama": _LLAMA | _SMALL,
    "qwen2": _LLAMA | _SMALL | {"model_type": "qwen2"},
    "gpt2": {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64} | _SMALL,
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", _DECODERS)
def test_a_config_of_hugging_face_with_transformers(kind: str, tmp_path: Path) -> None:
    """Its models look at a batch to see which mask they need; the planner has none to look at."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(_DECODERS[kind]))
    model = describe(shapes.hugging_face(file, 16), kind)
    assert len(model.units) == 3 and (model.samples, model.tokens) == (1, 16)
    names = {line.name for line in model.tape.lines}
    assert any("attention_for_cpu" in name for name in names), "fused, without scores"
    if kind == "llama":
        assert model.numel == describe(shapes.language_model(shapes._shape(file, _DECODERS[kind]), 16), kind).numel


def test_named_shapes_have_their_published_sizes() -> None:
    with torch.device("meta"):
        sizes = {name: sum(p.numel() for p in shapes.named(name, 64).model().parameters()) for name in shapes.NAMED}
    assert sizes == {
        "llama-2-7b": 6_738_415_616,
        "llama-2-13b": 13_015_864_320,
        "llama-2-70b": 68_976_648_192,
        "llama-34b": 33_743_970_304,
        "llama-8b": 8_030_261_248,
        "llama-70b": 70_553_706_496,
        "llama-405b": 405_853_388_800,
    }


def test_any_number_of_ranks_and_no_group() -> None:
    assert not torch.distributed.is_initialized()
    model = describe(program(), "mlp", samples=3)
    assert model.samples == 3 and not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere"], "expected a .toml, a config.json, module:function, or one of llama-2-7b"),
        (["nowhere:program"], "found no module nowhere"),
        ([f"{__name__}:nothing"], "has no nothing"),
        ([f"{__name__}:needs_values"], "asks for values that are not known before a run"),
        ([f"{__name__}:cannot_be_built"], "cannot be built on the meta device: RuntimeError: no such file"),
        (["nowhere.toml"], "cannot read the config file"),
        (["nowhere.json"], "cannot read it"),
        ([f"{__name__}:program", "--hardware", "h101"], "nearest valid: h100-"),
        ([f"{__name__}:program", "--ranks", "4", "--replicas", "3"], "expected a number that divides the 4 ranks"),
        ([f"{__name__}:program", "--ranks", "0"], "--ranks 0: expected a number above 0"),
        ([f"{__name__}:program", "--host-budget", "0"], "--host-budget 0: expected a number above 0"),
        ([f"{__name__}:program", "--budget", "inf"], "--budget inf: expected a number above 0"),
        ([f"{__name__}:program", "--reshard", "often"], "--reshard often: expected always, never or a number"),
        ([f"{__name__}:program", "--batch", "3", "--micro", "2"], "expected a multiple of the micro-batch"),
        ([f"{__name__}:program", "--explain", "cost"], "expected one of peak"),
        ([f"{__name__}:program", "--optimizer", "lion"], "expected one of adamw"),
        ([f"{__name__}:program", "--param-dtype", "int3"], "expected a dtype"),
        ([f"{__name__}:program", "--sequence", "8"], "have a length of their own"),
        ([f"{__name__}:program", "--svg", "nowhere/plan.svg"], "--svg nowhere/plan.svg: cannot write it: No such"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value)[-40:],
)
def test_bad_input_is_one_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    assert main(["plan", *arguments, "--html", str(page)]) == 2
    out, err = capsys.readouterr()
    assert says in err and err.startswith("fullshard plan: ") and err.count("\n") == 1 and out == ""
    assert not page.exists()


@pytest.mark.slow
def test_70b_on_1024_ranks_takes_seconds() -> None:
    """No time is asserted beyond what hangs: `python -X importtime` is not in it, and machines differ."""
    run = subprocess.run(
        [sys.executable, "-m", "fullshard", "plan", "llama-70b", "--ranks", "1024", "--recompute", "whole", "--json"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["parameters"] == 70_553_706_496


# ---- dials of times, margins, and what comes after a run -------------------------------------------------------------


@pytest.mark.slow
def test_dials_of_storage_and_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    entry = f"{__name__}:program"
    found = []
    for given in ([], ["--storage-dtype", "bfloat16"], ["--compile"], ["--float8"], ["--compile-loss"]):
        assert main(["plan", entry, "--ranks", "2", "--json", *given]) == 0
        found.append(json.loads(capsys.readouterr().out))
    plain, stored, compiled, float8, loss = found
    assert stored["strategy"]["storage_dtype"] == "bfloat16"
    assert 2 * stored["terms"]["parameters"] == plain["terms"]["parameters"]
    assert compiled["compute_seconds"] < plain["compute_seconds"] and compiled["peak_bytes"] == plain["peak_bytes"]
    assert loss["strategy"]["compiled_loss"] and loss["compute_seconds"] < plain["compute_seconds"]
    assert loss["phases"]["loss"]["loss"] < plain["phases"]["loss"]["loss"]
    assert float8["strategy"]["float8"] and float8["compute_seconds"] <= plain["compute_seconds"]
    assert main(["plan", entry, "--hardware", "a100-80g", "--float8"]) == 2
    assert "float8: expected a device" in capsys.readouterr().err


def _run(folder: Path, seconds: list[float]) -> Path:
    folder.mkdir()
    lines = [json.dumps({"step": n, "seconds": each, "memory_bytes": 1000}) for n, each in enumerate(seconds, 1)]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


def test_a_run_says_which_machine_would_have_made_its_plan_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry, mine = f"{__name__}:program", tmp_path / "mine.toml"
    asked = ["plan", entry, "--ranks", "2"]
    for hardware, factor in (("cpu", 3.0), ("h100-80g", 0.7)):
        main([*asked, "--hardware", hardware, "--json"])
        took = factor * json.loads(capsys.readouterr().out)["step_seconds"]
        run = _run(tmp_path / hardware, [9e9, took, took * 0.99, took * 1.01])
        assert main([*asked, "--hardware", hardware, "--compare", str(run), "--calibrate", str(mine)]) == 0
        out = capsys.readouterr().out
        assert f"{1 / factor - 1:+.1%}" in out and "3 steps, the median" in out and "matmul = " in out
        assert mine.read_text() in out
        main([*asked, "--hardware", str(mine), "--json"])
        assert json.loads(capsys.readouterr().out)["step_seconds"] == pytest.approx(took, rel=0.01)


def test_where_messages_take_longer_than_the_step_they_are_what_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = tmp_path / "slow.toml"
    slow.write_text('base = "cpu"\nlatency = 10.0\n')
    asked, run = ["plan", f"{__name__}:program", "--ranks", "2"], _run(tmp_path / "run", [2.0, 2.0])
    assert main([*asked, "--hardware", str(slow), "--compare", str(run), "--calibrate", str(slow)]) == 0
    assert "latency = " in capsys.readouterr().out
    main([*asked, "--hardware", str(slow), "--json"])
    assert json.loads(capsys.readouterr().out)["step_seconds"] == pytest.approx(2.0, rel=0.01)


# Of 100 ms: until the forward 10, forward 20, loss 20, backward 35 and 3 until all is reduced, then 12.
_PHASES = {
    "forward and loss": "40.0 ms",
    "backward": "38.0 ms",
    "optimizer and the rest": "22.0 ms",
    "waiting for gathers": "5.0 ms",
    "waiting for reductions": "6.0 ms",
    "waiting for other messages": "3.0 ms",
}


def _recorded(run: Path) -> None:
    """The record of rank 0, of a first step and one of `_PHASES`."""
    header = Header(0, 2, 1, {}, "cpu", "here", (0, 0), (Unit("", "Net", 4, 2, 16, 8, "float32", False),), {})
    ms = 10**6
    kinds = {"pre_forward": 10, "post_forward": 30, "pre_backward": 50, "backward_end": 85}
    events = [[at * ms, kind, 0, "", None] for kind, at in kinds.items()]
    waits = (("unshard", 12, 17), ("reduce", 60, 64), ("reduce", 86, 88), ("clip_grad_norm_", 90, 93))
    messages = [
        ["data", number, 0, what, 8, 11 * ms, need * ms, None, ready * ms, None, None]
        for number, (what, need, ready) in enumerate(waits)
    ]
    detail = {"events": events, "commands": [], "messages": messages, "levels": []}
    steps = [
        {"step": n, "begin": 0, "end": took * ms, "figures": {}, "detail": detail} for n, took in ((1, 999), (2, 100))
    ]
    (run / "see").mkdir()
    (run / "see" / file_name(1, 0)).write_bytes(b"".join(map(line, [header_fields(header), *steps, {"ended": True}])))


def test_phases_of_a_run_are_beside_those_of_its_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = _run(tmp_path / "run", [2.0, 0.1])
    asked = ["plan", f"{__name__}:program", "--hardware", "cpu", "--compare", str(run)]
    assert main([*asked, "--ranks", "2"]) == 0 and "phases were not measured" in capsys.readouterr().out
    _recorded(run)
    numel = sum(p.numel() for p in program().model().parameters())
    (run / "manifest.json").write_text(json.dumps({"world": {"processes": 2}, "parameters": numel}))
    assert main([*asked, "--ranks", "2"]) == 0
    found = {}
    for said in capsys.readouterr().out.splitlines():
        if len(cells := re.split(r"\s{2,}", said.strip())) >= 3:
            found[cells[0]] = cells[2]
    assert found | _PHASES == found and found["step"] == "100.0 ms"
    assert main([*asked, "--ranks", "4"]) == 2
    assert "expected a run on 4 ranks, as planned, found one on 2; plan with --ranks 2" in capsys.readouterr().err
    (run / "manifest.json").write_text(json.dumps({"world": {"processes": 2}, "parameters": 5}))
    assert main([*asked, "--ranks", "2"]) == 2
    assert f"of {numel:,} parameters, found one of 5; plan {run / 'config.toml'}" in capsys.readouterr().err
    (run / "metrics.jsonl").write_text("no json")
    assert main([*asked, "--ranks", "2"]) == 2 and "expected a JSON object a line" in capsys.readouterr().err


@pytest.mark.parametrize("accumulate", [1, 2, 6])
def test_phases_of_a_plan_are_all_of_its_step(accumulate: int) -> None:
    strategy = Strategy(ranks=2, backend="fake", accumulate=accumulate)
    found = predict(MODELS["mlp"], strategy, 2).found
    assert set(found.phases) == {"forward", "loss", "backward", "end", "optimizer"}
    assert sum(found.phases.values()) == pytest.approx(found.seconds)
    once = predict(MODELS["mlp"], replace(strategy, accumulate=1), 2).found
    assert found.phases["loss"] == pytest.approx(accumulate * once.phases["loss"])


def test_a_run_without_steps_and_no_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entry = f"{__name__}:program"
    for given, said in (
        ([entry, "--compare", str(tmp_path)], "cannot read it"),
        ([entry, "--compare", str(_run(tmp_path / "none", []))], "expected a run that recorded steps"),
        ([], "expected a SOURCE to plan"),
    ):
        assert main(["plan", *given, "--hardware", "cpu"]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_machine_is_measured_by_as_many_processes_and_written(
    ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration.measure, "__defaults__", (0.05,))
    file = tmp_path / "here.toml"
    assert main(["plan", "--hardware", "cpu", "--ranks", str(ranks), "--calibrate", str(file)]) == 0
    found, base = find_hardware(str(file)), find_hardware("cpu")
    assert file.read_text() == capsys.readouterr().out
    names = {"flops2", "flops4", "attention", "bandwidth", "launch", "step", "step_launch", "stream2", "attention2"}
    sent = {"intra_node", "inter_node", "exchanging", "scattering", "summing", "latency", "contention"}
    differ = {f.name for f in fields(found) if getattr(found, f.name) != getattr(base, f.name)}
    # Shares of messages that took less than a short one cannot be told apart, and contention may be none.
    least = names | ({"intra_node", "inter_node", "latency"} if ranks > 1 else set())
    assert least <= differ <= names | {"name", "memory", "stream"} | (sent if ranks > 1 else set())
    # A plan by it: what each number is of takes time.
    assert main(["plan", f"{__name__}:program", "--ranks", str(ranks), "--hardware", str(file), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["compute_seconds"] > 0 and plan["optimizer_seconds"] > 0


def test_shares_of_a_device_are_measured() -> None:
    shares = measured_device(find_hardware("h100-80g"), torch.device("cpu"), rows=64, width=64)
    assert (
        shares.matmul > 0
        and shares.stream > 0
        and shares.host > 0
        and shares.flops2 == find_hardware("h100-80g").flops2
    )
    assert "float8" not in machine_file(shares, "h100-80g") and "matmul = " in machine_file(shares, "h100-80g")
