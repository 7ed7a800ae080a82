"""Make torch's builds for CUDA run on a machine without NVIDIA's packages: a stub library for each missing one.

    python -m tools.cuda_stubs SITE          SITE: the folder that has `torch` (where pip or unzip put the wheel)

The wheel of torch is linked with some 20 libraries of other wheels (4 GB). Without a device none of their functions is
called but those that ask how many devices there are. So a stub defines the symbols that torch's libraries want of it,
with the names of their versions, and each function answers 100, which is `cudaErrorNoDevice` and
`CUDA_ERROR_NO_DEVICE`: torch then counts no device, without a warning, as on a machine with a driver and no GPU.

Wanted and defined symbols are those that `readelf` prints; it and a C compiler have to be there. Libraries that the
system or the wheel has are left alone, so that on a machine with them, and for builds for CPUs, nothing is done.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

# A stub has this symbol, so that another run finds and replaces it.
MARK = "fullshard_cuda_stub"
NO_DEVICE = 100
# Prefixes of NVIDIA's symbols without a version, which name no library: any stub may define them.
_NVIDIA = re.compile(r"(cu|nccl|nvrtc|nvshmem|nvml|nvJitLink|nvtx|__cuda)")
# Functions that return a text.
_TEXT = re.compile(r"(ErrorString|ErrorName|StatusString|StatusName|GetLastError|GetErrorString)$")
_STATUS = {"cudaGetLastError", "cudaPeekAtLastError"}


@dataclass(frozen=True)
class Wanted:
    """An undefined symbol of a library. `version` and `library` (its soname) are "" for one without a version."""

    symbol: str
    version: str
    library: str


@dataclass(frozen=True)
class Elf:
    """What one library needs and has."""

    needed: frozenset[str]
    wanted: frozenset[Wanted]
    defined: frozenset[str]


def read(path: Path) -> Elf:
    """The dynamic section, symbols and versions of a library."""
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", _readelf("--dynamic", path))
    library_of: dict[str, str] = {}
    library = ""
    for line in _readelf("--version-info", path).splitlines():
        if found := re.search(r"Version: \d+\s+File: (\S+)\s+Cnt:", line):
            library = found[1]
        elif library and (found := re.search(r"Name: (\S+)\s+Flags:", line)):
            library_of[found[1]] = library
    wanted, defined = set(), set()
    for line in _readelf("--dyn-syms", path).splitlines():
        fields = line.split()
        if len(fields) < 8 or not fields[0].rstrip(":").isdigit():
            continue
        name, _, version = fields[7].partition("@")
        version = version.lstrip("@")
        if fields[6] == "UND":
            wanted.add(Wanted(name, version, library_of.get(version, "")))
        else:
            defined.add(name)
    return Elf(frozenset(needed), frozenset(wanted), frozenset(defined))


def _readelf(option: str, path: Path) -> str:
    return subprocess.run(["readelf", option, "--wide", path], check=True, capture_output=True, text=True).stdout


def stubs_of(libraries: Iterable[Elf], there: frozenset[str]) -> dict[str, dict[str, str]]:
    """Missing library -> its symbols -> their versions. `there`: names of libraries that are found."""
    libraries = list(libraries)
    missing = sorted(set().union(*(one.needed for one in libraries)) - there)
    defined = frozenset().union(*(one.defined for one in libraries))
    stubs: dict[str, dict[str, str]] = {name: {} for name in missing}
    for wanted in set().union(*(one.wanted for one in libraries)):
        if wanted.library in stubs:
            stubs[wanted.library][wanted.symbol] = wanted.version
        elif missing and not wanted.version and wanted.symbol not in defined and _NVIDIA.match(wanted.symbol):
            stubs[missing[0]][wanted.symbol] = ""
    return stubs


def code_of(symbols: Iterable[str]) -> str:
    """A stub's source in C."""
    lines = [f"const int {MARK} = 1;"]
    for symbol in sorted(symbols):
        if symbol.startswith("__cudaRegister"):  # called when libraries are loaded; what it returns is kept
            lines.append(f"void *{symbol}(void) {{ static void *place[64]; return place; }}")
        elif _TEXT.search(symbol) and symbol not in _STATUS:
            lines.append(f'const char *{symbol}(void) {{ return "a stub of fullshard\'s tools: there is no device"; }}')
        else:
            lines.append(f"int {symbol}(void) {{ return {NO_DEVICE}; }}")
    return "\n".join(lines) + "\n"


def build(soname: str, symbols: dict[str, str], folder: Path) -> None:
    """Compile a stub into `folder`."""
    by_version: defaultdict[str, list[str]] = defaultdict(list)
    for symbol, version in sorted(symbols.items()):
        by_version[version].append(symbol)
    with tempfile.TemporaryDirectory() as scratch:
        source, versions = Path(scratch, "stub.c"), Path(scratch, "stub.map")
        source.write_text(code_of(symbols))
        blocks = [f"{version} {{ global: {'; '.join(names)}; }};" for version, names in by_version.items() if version]
        versions.write_text("\n".join(blocks) + "\n")
        script = [f"-Wl,--version-script={versions}"] if blocks else []
        compiler = shutil.which("cc") or shutil.which("gcc") or "cc"
        command = [compiler, "-shared", "-fPIC", "-O0", "-w", "-fno-builtin", f"-Wl,-soname,{soname}", *script]
        subprocess.run([*command, "-o", folder / soname, source], check=True)


def _libraries(site: Path) -> Iterator[Path]:
    for path in [*(site / "torch" / "lib").glob("*.so*"), *(site / "torch").glob("_C*.so")]:
        if path.is_file() and not path.is_symlink():
            yield path


def _is_stub(path: Path) -> bool:
    return path.stat().st_size < 1 << 20 and MARK.encode() in path.read_bytes()


def _of_the_system() -> frozenset[str]:
    listed = subprocess.run(["ldconfig", "-p"], check=True, capture_output=True, text=True).stdout
    return frozenset(re.findall(r"^\s+(\S+) \(", listed, flags=re.M))


def make(site: Path) -> list[str]:
    """Make what `site`'s torch misses, beside its libraries; the names of the stubs. Earlier stubs are replaced."""
    for path in _libraries(site):
        if _is_stub(path):
            path.unlink()
    own = list(_libraries(site))
    there = _of_the_system() | {path.name for path in own}
    # pip puts NVIDIA's wheels beside torch.
    there |= {path.name for path in (site / "nvidia").rglob("*.so*")}
    stubs = stubs_of([read(path) for path in own], frozenset(there))
    for soname, symbols in stubs.items():
        build(soname, symbols, site / "torch" / "lib")
    return list(stubs)


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1], "torch").is_dir():
        sys.exit(f"usage: python -m tools.cuda_stubs SITE\nexpected a folder that has torch, found {sys.argv[1:]}")
    made = make(Path(sys.argv[1]))
    print(f"{len(made)} stub libraries" + (f": {', '.join(made)}" if made else "; nothing is missing"))
