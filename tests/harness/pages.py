"""The code blocks of a document, and how each is run: docs/code-blocks.md is the convention.

blocks(text)             every block, in the order of the page
run(path, folder)        run those of one document in an empty folder; raises with the line of the block that failed,
                         or whose output is not what the page shows

    python -m tests.harness.pages docs/prepare.md [folder]
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import tomllib
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from tests.harness.pool import pool

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

CODE = ("python",)
SHELL = ("sh", "console")
DATA = ("toml", "yaml", "json")
SHOWN = ("text", "diff")
LANGUAGES = {*CODE, *SHELL, *DATA, *SHOWN}
ATTRIBUTES = {"title", "norun", "exit", "output", "linenums", "hl_lines"}
# What a `text` block that follows commands may say of itself; without it, its lines are compared with what they print.
OUTPUTS = ("numbers vary", "of another run")
_FENCE = re.compile(
    r"^(?P<indent> *)(?P<ticks>`{3,})(?P<language>[^\s`]*)(?P<more>[^\n`]*)\n(?P<code>.*?)^(?P=indent)(?P=ticks) *$"
    r"|^<!-- run: (?P<word>\w+)(?P<rest>[^\n]*?)(?:\n(?P<hidden>.*?)\n)? ?-->$",
    flags=re.M | re.S,
)
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')
# A command of a page may train for a while; one that hangs ends here.
COMMAND_SECONDS = 900


@dataclass(frozen=True)
class Block:
    """A fenced block, or an invisible one. `line`: where its code begins in the document."""

    language: str
    code: str
    line: int
    attributes: tuple[tuple[str, str], ...] = ()
    hidden: bool = False
    # What follows the attributes and is none.
    odd: str = ""
    # What the page shows of what it prints: the `text` block after it, or a console's own lines.
    shown: Block | None = None

    def get(self, name: str) -> str | None:
        return dict(self.attributes).get(name)

    @property
    def step(self) -> str | None:
        """How it is run: "file", "shell" or "python"; None for what is only shown."""
        if self.get("norun") is not None or self.language in SHOWN:
            return None
        if self.get("title") is not None:
            return "file"
        return "shell" if self.language in SHELL else "python" if self.language in CODE else None

    @property
    def commands(self) -> str:
        """Of a console, what stands after the prompts; the rest is what they print."""
        if self.language != "console":
            return self.code
        return "\n".join(line[2:] for line in self.code.splitlines() if line.startswith(("$ ", "> ")))


def documents() -> list[Path]:
    """Those whose blocks run: all that people read, but records, which show what was on their day."""
    pages = [path for path in DOCS.rglob("*.md") if path.parent.name != "adr" and not re.search(r"_\d{4}-", path.name)]
    return sorted([*pages, ROOT / "README.md", ROOT / "CONTRIBUTING.md"])


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(text: str) -> list[Block]:
    """The fenced blocks and the invisible ones (`<!-- run: setup` and `<!-- run: sh`), in order."""
    found = []
    for match in _FENCE.finditer(text):
        if match["word"] is None:
            line = text.count("\n", 0, match.start("code")) + 1
            code = textwrap.dedent(match["code"])
            attributes = tuple(_ATTRIBUTE.findall(match["more"]))
            odd = _ATTRIBUTE.sub("", match["more"]).strip()
            found.append(Block(match["language"], code, line, attributes, odd=odd))
        elif match["word"] in ("setup", "sh"):
            language = "python" if match["word"] == "setup" else "sh"
            line = text.count("\n", 0, match.start("hidden")) + 1
            found.append(Block(language, match["hidden"] + "\n", line, hidden=True, odd=match["rest"].strip()))
    return found


def ranks(text: str) -> int:
    """On how many its Python runs."""
    found = re.search(r"^<!-- run: ranks (\d+) -->$", text, flags=re.M)
    return int(found[1]) if found else 2


def run_by(text: str) -> str | None:
    """The test that runs this document instead."""
    found = re.search(r"^<!-- run: by (\S+) -->$", text, flags=re.M)
    return found and found[1]


def problems(text: str) -> list[str]:
    """What is against the convention, each with its line."""
    found = []
    for block in blocks(text):

        def wrong(what: str, block: Block = block) -> None:
            found.append(f"line {block.line}: {what}")

        if block.language not in LANGUAGES:
            wrong(f"expected a language, one of {sorted(LANGUAGES)}, found {block.language!r}")
        unknown = {key for key, _ in block.attributes} - ATTRIBUTES
        if unknown or block.odd:
            wrong(f'expected attributes {sorted(ATTRIBUTES)} as name="value", found {sorted(unknown)} {block.odd}')
        if (output := block.get("output")) is not None and (block.language != "text" or output not in OUTPUTS):
            wrong(f"expected output on a text block, one of {OUTPUTS}, found {output!r} on {block.language}")
        if block.language == "console" and "$ " not in block.code:
            wrong("expected commands after `$ ` in a console block; output alone is `text`")
        if block.language in CODE and block.get("norun") is None:
            try:
                compile(block.code, "block", "exec")
            except SyntaxError as error:
                wrong(f"not Python: {error}")
        if block.language in DATA:
            try:
                _read(block.language, block.code)
            except ValueError as error:
                wrong(f"not {block.language}: {error}")
    return found


def _read(language: str, code: str) -> None:
    if language == "toml":
        tomllib.loads(code)
    elif language == "json":
        json.loads(code)
    else:
        import yaml

        try:
            list(yaml.safe_load_all(code))
        except yaml.YAMLError as error:
            raise ValueError(str(error)) from error


def steps(text: str) -> list[Block]:
    """The blocks that run, each with what the page shows of its output."""
    by = run_by(text)
    found: list[Block] = []
    # Where in `found` the last visible block is, if it runs and nothing visible came after it.
    last: int | None = None
    for block in blocks(text):
        if block.step and not (by and block.step == "python"):
            found.append(block)
        if block.hidden:
            continue
        if block.language == "text" and last is not None and _prints(found[last]):
            if block.get("output") != "of another run":
                found[last] = replace(found[last], shown=block)
        last = len(found) - 1 if found and found[-1] is block else None
        if block.language == "console" and last is not None:
            lines = [line for line in block.code.splitlines() if not line.startswith(("$ ", "> "))]
            found[last] = replace(block, shown=replace(block, language="text", code="\n".join(lines)))
    return found


def _prints(block: Block) -> bool:
    return block.step == "shell" or (block.step == "python" and "print(" in block.code)


# ---- shown output ----------------------------------------------------------------------------------------------

_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
_TIME = re.compile(r"\d[\d,]*(?:\.\d+)? ?(?:us|ms|s|min|h)\b")
# Decimals are of a machine's arithmetic; whole numbers count something and are equal.
CLOSE = 0.02


def unlike(shown: Block, printed: str) -> str | None:
    """The first line that the page shows and that was not printed after the line before it, or None.

    Lines may be missing (`...`, warnings between them). Times are never compared, decimals to 2 %.
    """
    rest = iter([_words(line) for line in printed.splitlines()])
    vary = shown.get("output") == "numbers vary"
    for line in shown.code.splitlines():
        wanted = _words(line)
        if wanted and wanted != "..." and not any(_alike(wanted, found, vary=vary) for found in rest):
            return line
    return None


def _words(line: str) -> str:
    """The line without widths of columns and rulers, which follow the numbers in them, and without times."""
    return _TIME.sub("TIME", " ".join(re.sub(r"-{4,}", "----", line).split()))


def _alike(wanted: str, found: str, *, vary: bool) -> bool:
    if _NUMBER.sub("#", wanted) != _NUMBER.sub("#", found):
        return False
    return vary or all(map(_equal, _NUMBER.findall(wanted), _NUMBER.findall(found)))


def _equal(one: str, other: str) -> bool:
    if "." in one or "." in other or "e" in one or "e" in other:
        return math.isclose(float(one.replace(",", "")), float(other.replace(",", "")), rel_tol=CLOSE)
    return one == other


def _compare(block: Block, page: str, printed: str) -> None:
    if block.shown is not None and (line := unlike(block.shown, printed)) is not None:
        raise AssertionError(
            f"{page}, line {block.shown.line}: the page shows a line that was not printed, or not there:\n{line}\n"
            f"--- it printed ---\n{printed[-4000:]}"
        )


def run(path: Path, folder: Path) -> None:
    """Run the blocks of `path` in `folder`. Python without a title runs on two ranks, which wait for the rest."""
    text = path.read_text()
    todo = steps(text)
    if any(block.step == "python" for block in todo):
        shells = sum(block.step == "shell" for block in todo)
        pool(ranks(text)).run(_on_a_rank, name(path), todo, str(folder), timeout=60 + COMMAND_SECONDS * shells)
    else:
        for block in todo:
            _outside(block, name(path), folder)


def _on_a_rank(rank: int, page: str, todo: list[Block], folder: str) -> None:
    module = types.ModuleType("page")
    sys.modules["page"] = module
    with contextlib.chdir(folder), _settings_put_back():
        try:
            for block in todo:
                if block.step == "python":
                    # Its lines keep their numbers, so a traceback names those of the document.
                    code = compile("\n" * (block.line - 1) + block.code, str(ROOT / page), "exec")
                    output = io.StringIO()
                    with contextlib.redirect_stdout(output) if block.shown and rank == 0 else contextlib.nullcontext():
                        exec(code, vars(module))
                    if rank == 0:
                        _compare(block, page, output.getvalue())
                    continue
                dist.barrier()
                if rank == 0:
                    _outside(block, page, Path(folder))
                dist.barrier()
        finally:
            sys.modules.pop("page", None)


@contextlib.contextmanager
def _settings_put_back() -> Iterator[None]:
    path = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        with warnings.catch_warnings():
            for kind in (FutureWarning, DeprecationWarning):  # torch's and transformers', of each other
                warnings.simplefilter("ignore", kind)
            warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)  # torchdata's, of torch 2.13
            yield
    finally:
        sys.path[:] = path


# What a process of the pool, or pytest, has in its environment and a shell has not.
_OURS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")


def _outside(block: Block, page: str, folder: Path) -> None:
    title = block.get("title")
    if title is not None:
        file = folder / title
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(block.code)
        return
    environment = {key: value for key, value in os.environ.items() if key not in _OURS}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', '')}"
    environment |= {"OMP_NUM_THREADS": "1", "CHECKOUT": str(ROOT)}
    expected = int(block.get("exit") or 0)
    with tempfile.TemporaryFile("w+") as output:
        running = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", block.commands],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = running.wait(COMMAND_SECONDS)
        finally:  # what it started and left ends with it
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()
        output.seek(0)
        printed = output.read()
    if status != expected:
        raise AssertionError(
            f"{page}, line {block.line}: expected exit code {expected}, found {status}\n"
            f"{block.commands}\n--- it printed ---\n{printed[-4000:]}"
        )
    _compare(block, page, printed)


if __name__ == "__main__":
    # The ranks import this module by its name, so it runs under that name.
    from tests.harness import pages

    pages.run(Path(sys.argv[1]).resolve(), Path(sys.argv[2] if sys.argv[2:] else tempfile.mkdtemp(prefix="page-")))
