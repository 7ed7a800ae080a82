"""Everything that needs a GPU, in one call under ten minutes: tests, numbers, step times, memory, host time.

    python -m benchmarks.gpu                          on a machine with one CUDA device, or with two
    python -m benchmarks.gpu --device simulated --tiny  the script itself, without hardware; its times mean nothing and
                                                      are left out

    tests         tests/gpu
    ranks         parity with plain training, peak against `report`, step time against FSDP2 and the bare model,
                  overlap, exposed communication, offload bandwidth; with one device and with two (gpu_ranks)
    step, memory  a rank of a fake group of eight: kernels, allocator, bytes (gpu_step, memory)
    host          Python's time (host)

Each part runs in a process of its own and may fail without the others; what it printed is below the table's line of
that part, and in the last line, which is JSON. A part that would not fit into what is left of `--minutes` is left out
and named.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any, NamedTuple

from benchmarks.common import facts
from benchmarks.device import SIMULATED, device_of, name_of


class Part(NamedTuple):
    """A command, and the seconds that it is given at most."""

    name: str
    command: list[str]
    limit_s: float
    # The options that try the script itself.
    tiny: list[str]


def parts(device: str) -> list[Part]:
    """In the order of their worth, should the time not suffice."""
    on_device = ["--device", device]
    gpu_step = ["benchmarks.gpu_step", *on_device]
    small = ["--tiny", "--rounds", "1"]
    plugin = ["-p", "tests.harness.on_simulated"] if device == SIMULATED else []
    fake, alone = ["--groups", "fake 8", "--precisions", "mixed"], ["--groups", "world 1", "--precisions", "bf16"]
    found = [
        Part("tests", ["pytest", "-q", *plugin, "tests/gpu"], 120, ["--collect-only"]),
        Part("ranks", ["benchmarks.gpu_ranks", *on_device, "--limit", "75"], 150, [*small, "--limit", "300"]),
        Part("step, 8B-shaped", [*gpu_step, "--shapes", "8B"], 210, [*small, *fake, "--ways", "fullshard"]),
        Part("memory", ["benchmarks.memory", *on_device, "--worlds", "8"], 120, ["--tiny"]),
        Part("step, 1B-shaped", [*gpu_step, "--shapes", "1B"], 150, [*small, *alone, "--ways", "fsdp2", "fullshard"]),
    ]
    # It needs no device, and is nothing but times.
    return found if device == SIMULATED else [*found, Part("host", ["benchmarks.host", "--rounds", "20"], 60, small)]


def run(part: Part, *, tiny: bool, limit_s: float) -> dict[str, Any]:
    """Run it; what came of it, in seconds and text. The last line of a benchmark is JSON."""
    command = [sys.executable, "-m", *part.command, *(part.tiny if tiny else [])]
    begun = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit_s)
        code, text, errors = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as expired:
        code, errors = -1, f"ran past {limit_s:.0f} s"
        text = expired.stdout.decode() if isinstance(expired.stdout, bytes) else expired.stdout or ""
    lines = text.strip().splitlines()
    figures: Any = None
    if lines and lines[-1].startswith("{"):
        figures = json.loads(lines.pop())
    found = {
        "ok": code == 0,
        "seconds": round(time.monotonic() - begun, 1),
        "text": "\n".join(lines),
        "figures": figures,
    }
    if code:
        found["error"] = "\n".join(errors.strip().splitlines()[-5:])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda (the default), another one, or simulated")
    parser.add_argument("--minutes", type=float, default=9.5, help="for all parts together (default: 9.5)")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script itself")
    parser.add_argument("--parts", nargs="+", metavar="PART", help="only these; default: all of them")
    options = parser.parse_args()
    device = device_of(options.device)
    if device.type == SIMULATED:
        print("no hardware: this tries the script; times on this device mean nothing and are left out")
    end = time.monotonic() + 60 * options.minutes
    results: dict[str, Any] = {}
    found_parts = parts(options.device)
    names = [part.name for part in found_parts]
    if unknown := set(options.parts or ()).difference(names):
        parser.error(f"--parts: expected some of {', '.join(map(repr, names))}, found {sorted(unknown)}")
    for part in found_parts:
        if options.parts and part.name not in options.parts:
            continue
        left = end - time.monotonic()
        if left < 15:
            results[part.name] = {"ok": False, "seconds": 0.0, "text": "", "figures": None, "error": "no time left"}
        else:
            results[part.name] = run(part, tiny=options.tiny, limit_s=left if options.tiny else min(left, part.limit_s))
        found = results[part.name]
        print(f"\n==== {part.name}: {'ok' if found['ok'] else 'FAILED'}, {found['seconds']:.0f} s ====")
        print(found["text"])
        if "error" in found:
            print(found["error"])
        sys.stdout.flush()
    print(f"\n{'part':20} {'result':>8} {'seconds':>8}  (of the part itself)")
    for name, found in results.items():
        print(f"{name:20} {'ok' if found['ok'] else 'FAILED':>8} {found['seconds']:8.1f}")
    answers = {name: {key: found[key] for key in ("ok", "seconds", "figures")} for name, found in results.items()}
    print()
    print(json.dumps({"benchmark": "gpu", "facts": facts(), "device": name_of(device), "results": answers}))


if __name__ == "__main__":
    main()
