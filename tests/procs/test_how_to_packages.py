"""The sections of docs/how-to/data.md and docs/how-to/tracking.md, each by itself: some need a package that is not
installed here, and are skipped with its name."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.harness import pages

# In torch, in this package, or in Python.
HERE = {"torch", "fullshard", "pathlib", "itertools", "json"}


def _sections() -> Iterator[object]:
    for page in ("data", "tracking"):
        head, *rest = re.split(r"^## (.*)$", (pages.DOCS / "how-to" / f"{page}.md").read_text(), flags=re.M)
        shared = [block.code for block in pages.blocks(head) if block.step == "python"]
        for title, text in zip(rest[::2], rest[1::2], strict=True):
            code = [*shared, *(block.code for block in pages.blocks(text) if block.step == "python")]
            marks = [pytest.mark.slow] if _packages(code) or "tensorboard" in code[-1] else []
            yield pytest.param(code, id=f"{page}: {title}", marks=marks)


def _packages(code: list[str]) -> set[str]:
    """What the code imports that is not here."""
    return set(re.findall(r"^(?:from|import) (\w+)", "\n".join(code), flags=re.M)) - HERE


@pytest.mark.sample(2)
@pytest.mark.hang_after(300)
@pytest.mark.parametrize("code", list(_sections()))
def test_a_section_runs_on_two_ranks(code: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in sorted(_packages(code)):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    page = tmp_path / "page.md"
    page.write_text("".join(f"```python\n{block}```\n\n" for block in code))
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    pages.run(page, tmp_path)


@pytest.mark.slow
@pytest.mark.hang_after(300)
@pytest.mark.parametrize("world, workers", [(1, 0), (3, 0), (3, 2)])
def test_a_section_continues_on_another_number_of_ranks(world: int, workers: int, tmp_path: Path) -> None:
    """What two ranks saved after two batches continues with the third, whichever ranks read it. Processes that torchrun
    starts, because a loader's workers are processes of its own."""
    pytest.importorskip("torchdata", reason="torchdata is not installed")
    [code] = [case.values[0] for case in _sections() if case.id == "data: Continue exactly, on any number of ranks"]  # type: ignore[attr-defined]
    text = "import json\n" + "".join(code).replace("batch_sampler=", f"num_workers={workers}, batch_sampler=")
    define, _, rest = text.partition("loader = build()\n")
    define += 'dist.init_process_group("gloo")\nloader = build()\n'
    shows = "gathered = [None] * dist.get_world_size()\n"
    shows += "dist.all_gather_object(gathered, [next(batches).tolist() for _ in range(6)])\n"
    shows += "dist.get_rank() or print(json.dumps(gathered))\ndist.destroy_process_group()\n"
    load = 'checkpoint.load({"data": loader}, checkpoint_id="step-2")\nbatches = iter(loader)\n'
    _torchrun(2, define + rest.partition("again = build()")[0] + shows, tmp_path)
    found = _torchrun(world, define + load + shows, tmp_path)
    assert len(found) == world
    orders = [torch.randperm(24, generator=torch.Generator().manual_seed(epoch)).split(6) for epoch in range(3)]
    whole = [rows.tolist() for order in orders for rows in order]
    # The rest of the first epoch, and the second one.
    for number, parts in enumerate(zip(*found, strict=True)):
        assert sorted(itertools.chain(*parts)) == sorted(whole[2 + number]), number


def _torchrun(ranks: int, program: str, folder: Path) -> list[list[list[int]]]:
    """What `program` prints as JSON, on so many ranks."""
    (folder / "program.py").write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run([*command, "program.py"], cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("[")]
    found: list[list[list[int]]] = json.loads(line)
    return found


def test_the_packages_that_pages_name_are_known() -> None:
    """A section that imports nothing new is no reason for a skip."""
    found = {str(case.id): _packages(case.values[0]) for case in _sections()}  # type: ignore[attr-defined]
    assert {name for names in found.values() for name in names} == {"datasets", "torchdata", "wandb", "mlflow"}
    assert sum(not names for names in found.values()) >= 3
