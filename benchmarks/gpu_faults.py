"""What one rank does wrong, what the other one says of it, and after how many seconds: two ranks of NCCL on one device.

    python -m benchmarks.gpu_faults
    python -m benchmarks.gpu_faults --device simulated --tiny      the script itself, without hardware

Both ranks train blocks (AdamW, a `guard` around each step). Rank 1 does something wrong in its fourth step; `FAULTS`
says what, and which exceptions docs/failures.md promises. All faults run at once, each with ranks of its own. A row has
what became of each rank: the class of its exception, or how its process ended; `after_s` counts on rank 0 from the
moment at which rank 1 did it. Where both ranks may continue they load what they had, train on, and `recovered` says
whether their parameters are, bit for bit, those of a training without the fault.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.device import SIMULATED, device_of, machine, synchronize
from benchmarks.gpu_checks import Rank, whole
from benchmarks.gpu_parts import row, shows_stacks
from benchmarks.gpu_ranks import environment
from benchmarks.gpu_step import build, loss_of

STEPS, FAILED = 6, 3
SILENCE_SECONDS = 5
LIMIT_SECONDS = 32.0


class Fault(NamedTuple):
    """`act`: what rank 1 does, with the model and the optimizer; it returns whether its step continues. `other`: what
    rank 0 is to raise. `own`: rank 1 itself. `again`: whether both can continue after a load. `limit_s`:
    of the process group."""

    act: Callable[[Any, torch.optim.Optimizer], bool]
    other: tuple[str, ...]
    own: tuple[str, ...] = ()
    again: bool = False
    limit_s: float = 600.0


def _raises(model: Any, optimizer: Any) -> bool:  # noqa: ARG001
    raise ValueError("planted")


def _raises_later(model: Any, optimizer: Any) -> bool:  # noqa: ARG001
    synchronize(next(model.parameters()).device)
    raise ValueError("planted")


def _raises_in_backward(model: Any, optimizer: Any) -> bool:  # noqa: ARG001
    def hook(grad: Any) -> None:  # noqa: ARG001
        raise ValueError("planted in a backward")

    model.blocks[1].register_full_backward_hook(lambda *_: hook(None))
    return True


def _swaps_blocks(model: Any, optimizer: Any) -> bool:  # noqa: ARG001
    model.blocks = torch.nn.ModuleList([model.blocks[1], model.blocks[0], *model.blocks[2:]])
    return True


def _other_rate(model: Any, optimizer: Any) -> bool:  # noqa: ARG001
    optimizer.param_groups[0]["lr"] *= 2
    return True


def _alone_in_a_collective(model: Any, optimizer: Any) -> bool:  # noqa: ARG001
    dist.all_reduce(torch.ones(1, device=next(model.parameters()).device))
    return True


def _ends(model: Any, optimizer: Any) -> bool:  # noqa: ARG001
    sys.exit(0)


def _is_killed(model: Any, optimizer: Any) -> bool:  # noqa: ARG001
    os.kill(os.getpid(), signal.SIGKILL)
    return False


def _is_stopped(model: Any, optimizer: Any) -> bool:  # noqa: ARG001
    os.kill(os.getpid(), signal.SIGSTOP)
    return False


FAULTS = {
    "raises in its step": Fault(_raises, ("PeerFailed",), ("ValueError",), again=True),
    "raises when its messages have ended": Fault(_raises_later, ("PeerFailed",), ("ValueError",), again=True),
    "raises in a backward": Fault(_raises_in_backward, ("PeerFailed",), ("ValueError",)),
    "swaps two blocks": Fault(_swaps_blocks, ("RanksDisagree",), ("RanksDisagree",)),
    "doubles its learning rate": Fault(_other_rate, ("RanksDisagree",), ("RanksDisagree",)),
    # Not seen before the limit of the process group, which is short here.
    "is alone in an all-reduce": Fault(
        _alone_in_a_collective, ("PeerFailed", "RanksDisagree", "ended by SIGABRT"), limit_s=12.0
    ),
    "ends early": Fault(_ends, ("PeerFailed",)),
    "is killed": Fault(_is_killed, ("PeerFailed", "ended by SIGABRT")),
    "is stopped": Fault(_is_stopped, ("PeerFailed",)),
}


# ---- on each rank ----------------------------------------------------------------------------------------------------


def _trained(at: Rank, fault: Fault | None, note: Callable[..., None]) -> list[torch.Tensor]:
    """Parameters after `STEPS` steps."""
    import fullshard

    model = build("fullshard", at.small, at.device, at.mesh(), precision="mixed", same=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    kept: tuple[Any, Any] = ({}, {})
    step, done, failed = 0, False, False
    while step < STEPS:
        if fault is not None and step == FAILED and not done:
            kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        try:
            with fullshard.guard(model, optimizer):
                if fault is not None and step == FAILED and not done:
                    if at.rank == 1:
                        note(at=time.time())
                        if not fault.act(model, optimizer):
                            break
                    done = True
                x = at.batch(at.small, step, at.rank, torch.bfloat16)
                loss_of(model, x).backward()
                optimizer.step()
            optimizer.zero_grad()
        except (fullshard.PeerFailed, fullshard.RanksDisagree, ValueError) as error:
            note(raised=type(error).__name__, text=str(error)[:2000], at=None if at.rank == 1 else time.time())
            if fault is None or not fault.again or failed:
                raise
            done = failed = True
            optimizer.zero_grad()
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
            continue
        step += 1
    return [whole(parameter, at.device) for parameter in model.parameters()]


def work(options: argparse.Namespace) -> None:
    """Train, with the fault on rank 1; what becomes of it goes to a file."""
    warnings.filterwarnings("ignore", module="torch")
    folder = Path(options.folder)
    path, said = folder / f"rank {options.rank}", {}

    def note(**more: Any) -> None:
        said.update({key: value for key, value in more.items() if value is not None})
        path.with_suffix(".new").write_text(json.dumps(said))
        path.with_suffix(".new").replace(path)

    device = device_of(options.device)
    backend = "nccl" if device.type == "cuda" else dist.get_default_backend_for_device(device)
    at = Rank(options.rank, 2, device, backend, folder, options.tiny, 1)
    fault = FAULTS[options.fault]
    limit = timedelta(seconds=fault.limit_s)
    dist.init_process_group(f"cpu:gloo,{device.type}:{backend}", rank=at.rank, world_size=2, timeout=limit)
    expected = _trained(at, None, note) if fault.again else None
    found = _trained(at, fault, note)
    if expected is not None:
        note(recovered=all(map(torch.equal, found, expected)))
    note(ended=True)
    dist.destroy_process_group()


# ---- in the process that asks ----------------------------------------------------------------------------------------


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _started(options: argparse.Namespace, fault: str, folder: str) -> list[subprocess.Popen[str]]:
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "FULLSHARD_SILENCE": str(SILENCE_SECONDS)}
    command = [sys.executable, "-m", "benchmarks.gpu_faults", "--device", options.device, "--fault", fault]
    command += ["--folder", folder, *(["--tiny"] if options.tiny else [])]
    return [
        subprocess.Popen(
            [*command, "--rank", str(rank)],
            env={**os.environ, **environment("nccl pair", rank), **own},
            stdout=subprocess.DEVNULL,
            stderr=open(Path(folder) / f"errors {rank}", "w"),  # noqa: SIM115  (the process has it)
            text=True,
        )
        for rank in range(2)
    ]


def _outcome(said: dict[str, Any], status: int | None) -> str:
    if "raised" in said:
        return str(said["raised"])
    if said.get("ended"):
        return "trained to its end"
    if status is None:
        return "was still there"
    return f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def _judged(name: str, folder: str, statuses: list[int | None]) -> dict[str, Any]:
    """The row of a fault."""
    said = []
    for rank in range(2):
        path = Path(folder) / f"rank {rank}"
        said.append(json.loads(path.read_text()) if path.exists() else {})
    fault = FAULTS[name]
    outcomes = [_outcome(one, status) for one, status in zip(said, statuses, strict=True)]
    figures: dict[str, Any] = {"fault": name, "rank_0": outcomes[0], "rank_1": outcomes[1]}
    both = "at" in said[0] and "at" in said[1]
    figures["after_s"] = round(said[0]["at"] - said[1]["at"], 2) if both else None
    figures["recovered"] = said[0].get("recovered")
    figures["text"] = " ".join(str(said[0].get("text", "")).split())[:600]
    wrong = outcomes[0] not in fault.other or (fault.own and outcomes[1] not in fault.own)
    if wrong or (fault.again and not figures["recovered"]):
        tail = [(Path(folder) / f"errors {rank}").read_text().strip()[-250:] for rank in range(2)]
        figures["could_not"] = f"expected {' or '.join(fault.other)} on rank 0; {tail}"
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda (the default), another one, or simulated")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, help="only these; default: all")
    parser.add_argument("--tiny", action="store_true", help="small blocks, to try the script itself")
    parser.add_argument("--fault", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        work(options)
        return
    shows_stacks()
    row("machine", **machine(device_of(options.device)))
    names = options.faults or list(FAULTS)
    with tempfile.TemporaryDirectory(prefix="fullshard-faults-", ignore_cleanup_errors=True) as folder:
        folders = {name: str(Path(folder) / str(place)) for place, name in enumerate(names)}
        for own in folders.values():
            Path(own).mkdir()
        end = time.monotonic() + LIMIT_SECONDS * (4 if options.device == SIMULATED else 1)
        running = {name: _started(options, name, own) for name, own in folders.items()}
        try:
            while running:
                for name, ranks in list(running.items()):
                    # Rank 0 says what it found; rank 1 may be stopped for ever, or wait for it.
                    over = ranks[0].poll() is not None and (ranks[1].poll() is not None or name == "is stopped")
                    if over or time.monotonic() > end:
                        row("fault", **_judged(name, folders[name], [rank.poll() for rank in ranks]))
                        del running[name]
                        _killed(ranks)
                time.sleep(0.05)
        finally:
            for ranks in running.values():
                _killed(ranks)


def _killed(ranks: list[subprocess.Popen[str]]) -> None:
    for rank in ranks:
        rank.kill()
        with suppress(subprocess.TimeoutExpired):
            rank.wait(5)


if __name__ == "__main__":
    main()
