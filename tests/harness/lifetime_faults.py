"""Faults of lifetimes, laziness and coalescing: what C++ keeps longer than Python, when it connects, what a launch is.

    LIFETIMES["connections are made by the first message"]     what it changes, and the program that shows it

As in tests/harness/seeded_faults.py each changes one place. The program (tests/harness/lifetimes.py) must find
something wrong on some rank, or hang; the sound engine must give an empty text on all: tests/device/test_lifetimes.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed as dist

from tests.harness import lifetimes
from tests.harness.on_device import Setup
from tests.harness.seeded_faults import SeededFault


class Lifetime(NamedTuple):
    """A fault, and the program with its arguments. `backend`: of the pool."""

    fault: SeededFault
    program: Any
    args: tuple[Any, ...] = ()
    world: int = 2
    backend: str = "nccl"
    # Ranks wait for each other until the test ends them.
    hangs: bool = False
    # On a busy machine the program may end as with the sound engine.
    races: bool = False


class Forwarding(dist.Store):
    """A store of Python's, which C++ can call only for as long as Python holds it."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def set(self, key: str, value: str) -> None:
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        self.inner.wait([key])
        return bytes(self.inner.get(key))

    def add(self, key: str, amount: int) -> int:
        return int(self.inner.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self.inner.check(keys))

    def wait(self, keys: list[str], timeout: Any = None) -> None:  # noqa: ARG002
        self.inner.wait(keys)


_DG, _GROUPS, _GROUP = "comm.data_group:DataGroup", "_torch.groups", "comm.group:ShardGroup"
_MADE_WITHIN = "peers.scope:Scope.made_within"
_STORE = "    store = dist.PrefixStore(name, store)\n"
_KEPT = '("_timeout", "is_high_priority_stream", "config")'
_KNOWN = "known = list(outs), list(pieces)"
_EACH = "return [self.send(GATHERS_EACH, *known, GATHER)]"
_MAKES = ".ProcessGroupNCCL(store, rank, size, options), kinds.NCCL"
_HERE = "__import__('tests.harness.lifetime_faults', fromlist=['_'])"

LIFETIMES: dict[str, Lifetime] = {
    # ---- lifetimes ----
    "the store is one of Python's, and nobody keeps it": Lifetime(
        SeededFault(
            "comm.data_group:same_group", _STORE, f"    store = dist.PrefixStore(name, {_HERE}.Forwarding(store))\n"
        ),
        lifetimes.collects,
    ),
    "the store is one of Python's, kept until the group is connected": Lifetime(
        SeededFault(
            "comm.data_group:same_group",
            _STORE,
            f"    kept = {_HERE}.Forwarding(store)\n    store = dist.PrefixStore(name, kept)\n",
        ),
        lifetimes.collects,
    ),
    "options carry the split": Lifetime(
        SeededFault(f"{_GROUPS}:own_options", _KEPT, _KEPT[:-1] + ', "split_from", "split_color")'),
        lifetimes.bound,
        (),
        4,
        hangs=True,
    ),
    "options are the user's": Lifetime(
        SeededFault(f"{_GROUPS}:own_options", "made = type(like)()", "made = like"), lifetimes.collects
    ),
    "options are dropped": Lifetime(
        SeededFault(f"{_GROUPS}:own_options", "if hasattr(like, kept):", "if False:"), lifetimes.collects
    ),
    "the time limit is dropped": Lifetime(
        SeededFault(f"{_GROUPS}:own_options", '"_timeout", ', ""), lifetimes.collects
    ),
    "the priority is dropped": Lifetime(
        SeededFault(f"{_GROUPS}:own_options", '"is_high_priority_stream", ', ""), lifetimes.collects
    ),
    "the configuration is dropped": Lifetime(
        SeededFault(f"{_GROUPS}:own_options", ', "config")', ")"), lifetimes.collects
    ),
    "the ranks are not named": Lifetime(SeededFault(f"{_GROUPS}:own_options", "list(ranks)", "[]"), lifetimes.collects),
    "the group has no name": Lifetime(
        SeededFault(f"{_GROUPS}:own_options", "made.group_name = name", "pass"), lifetimes.collects
    ),
    "a message's work is kept": Lifetime(
        SeededFault(
            "comm.data_group:Sent.wait",
            "            self._work = None\n",
            "            self._work, scope.kept = None, work\n",
        ),
        lifetimes.holds_nothing,
    ),
    "a message is dropped before its event": Lifetime(
        SeededFault(
            "comm.data_group:Sent.wait",
            "torch.accelerator.current_stream(self.group.device).record_event()",
            "torch.Event(self.group.device)",
        ),
        lifetimes.cuts,
    ),
    "messages under way are forgotten": Lifetime(
        SeededFault(f"{_DG}.issue", "self._under_way.append(sent)", "pass"), lifetimes.cuts
    ),
    # ---- laziness: when connections are made and ended ----
    "connections are made by the first message": Lifetime(
        SeededFault(
            "comm.data_group:same_group",
            "own.eager_connect_single_device(_indexed(device))",
            "pass",
        ),
        lifetimes.collects,
    ),
    "nothing ends the wait for a connection": Lifetime(
        SeededFault(_MADE_WITHIN, "wait_until(made.done, wait)", "made.exception()"),
        lifetimes.dies_connecting,
        hangs=True,
    ),
    "connections are made outside of the watch": Lifetime(
        SeededFault(
            _MADE_WITHIN,
            "wait_until(made.done, wait)",
            "while not made.done(): threading.Event().wait(0.01)",
        ),
        lifetimes.dies_connecting,
        hangs=True,
    ),
    "the error of a connection is dropped": Lifetime(
        SeededFault(_MADE_WITHIN, "return made.result()", "return made._result"), lifetimes.refused
    ),
    "an abort is not called": Lifetime(SeededFault(f"{_DG}.cut", "self._group.abort()", "pass"), lifetimes.cuts),
    "a cut group is not known to be cut": Lifetime(
        SeededFault(f"{_DG}.cut", "self.cut_at = time.monotonic()", "pass"),
        lifetimes.cuts,
        races=True,
    ),
    "connections that were cut are used again": Lifetime(
        SeededFault(f"{_DG}.issue", "if self._renewed != self.scope.renewed:", "if self._group is None:"),
        lifetimes.cuts,
    ),
    "the name of connections is used again": Lifetime(
        SeededFault(f"{_DG}.connect", "/{scope.renewed}/", "/"),
        lifetimes.cuts,
        hangs=True,
    ),
    "ranks connect under different names": Lifetime(
        SeededFault(f"{_DG}.connect", "/{scope.renewed}/", "/{scope.rank}/"),
        lifetimes.collects,
        hangs=True,
    ),
    "a new group is a split of all ranks": Lifetime(
        SeededFault(
            "comm.group:new_group", "default.bound_device_id, None", "default.bound_device_id, default.bound_device_id"
        ),
        lifetimes.bound,
        (),
        4,
        hangs=True,
    ),
    # ---- errors that arrive late ----
    "an error that arrives late is taken as success": Lifetime(
        SeededFault(f"{_DG}.check", "if not self.is_cut", "if False"), lifetimes.breaks, (True,)
    ),
    "a time limit of NCCL is taken as success": Lifetime(
        SeededFault("agree.guarded_steps:arrive", "scope.groups.check()", "pass"), lifetimes.breaks, (False,)
    ),
    "what NCCL ended is not lost": Lifetime(
        SeededFault(f"{_DG}.refuse", "(number <= self.issued or bool(self.broke))", "number <= self.issued"),
        lifetimes.goes_on,
    ),
    "what was under way at an abort is not lost": Lifetime(
        SeededFault("peers.scope:Scope.fail", "self.losses.note_under_way(spoiled)", "pass"), lifetimes.cuts
    ),
    # ---- launches ----
    "a launch is left open": Lifetime(
        SeededFault(
            f"{_GROUP}.gather_each",
            _EACH,
            f"self.process_group._start_coalescing(self.device)\n        {_EACH}",
        ),
        lifetimes.direct,
        hangs=True,
    ),
    "a launch is waited for before its end": Lifetime(
        SeededFault(
            f"{_GROUP}.gather_each",
            _EACH,
            "self.process_group._start_coalescing(self.device)\n"
            "        work = self.send(GATHERS_EACH, *known, GATHER)\n"
            "        self.process_group._end_coalescing(self.device)\n"
            "        return [work]",
        ),
        lifetimes.direct,
    ),
    "an input changes between start and end of a launch": Lifetime(
        SeededFault(
            f"{_GROUP}.gather_each",
            _EACH,
            "self.process_group._start_coalescing(self.device)\n"
            "        self.send(GATHERS_EACH, *known, GATHER)\n"
            "        pieces[0].add_(1)\n"
            "        return [self.process_group._end_coalescing(self.device)]",
        ),
        lifetimes.direct,
    ),
    "a launch has another order on a rank": Lifetime(
        SeededFault(
            f"{_GROUP}.gather_each",
            _KNOWN,
            "known = (list(outs), list(pieces)) if self.rank else (list(outs)[::-1], list(pieces)[::-1])",
        ),
        lifetimes.direct,
    ),
    "a launch has two dtypes": Lifetime(
        SeededFault(
            f"{_GROUP}.gather_each",
            _KNOWN,
            "known = [outs[0].view(torch.uint8), *outs[1:]], [pieces[0].view(torch.uint8), *pieces[1:]]",
        ),
        lifetimes.direct,
    ),
    "a launch misses a message on a rank": Lifetime(
        SeededFault(
            f"{_GROUP}.gather_each",
            _KNOWN,
            "known = (list(outs), list(pieces)) if self.rank else (list(outs)[:1], list(pieces)[:1])",
        ),
        lifetimes.direct,
    ),
    # ---- what NCCL refuses ----
    "an output is not contiguous": Lifetime(
        SeededFault(
            f"{_GROUP}.reduce_scatter",
            "out, pieces, options)",
            "out, pieces.view(2, -1).t().contiguous().t(), options)",
        ),
        lifetimes.direct,
    ),
    "dtypes that NCCL lacks are sent": Lifetime(
        SeededFault(
            "comm.data_group:carried", "tensor if tensor.dtype in CARRIED else tensor.view(torch.uint8)", "tensor"
        ),
        lifetimes.direct,
    ),
    "a sum is premultiplied": Lifetime(
        SeededFault(
            f"{_GROUP}.reduce_scatter",
            "    return self.send(",
            "    options.reduceOp = torch._C._distributed_c10d._make_nccl_premul_sum(1.0)\n    return self.send(",
        ),
        lifetimes.direct,
    ),
    # A forward without gradients whose messages were not expected is compared by a small message of the host.
    "comparisons of the host go over NCCL": Lifetime(
        SeededFault(f"{_GROUP}.open", 'backend_name(self.origin, host), "check"', 'self.backend, "check"'),
        lifetimes.trains,
        (Setup(steps=2, evaluate=True),),
    ),
    "a tensor of the host is sent by the device": Lifetime(
        SeededFault(
            "comm.messages:all_reduce_over",
            "moved = tensor if elsewhere is None else tensor.to(elsewhere)",
            "moved = tensor",
        ),
        lifetimes.alone,
        (),
        2,
        "simulated:nccl",
    ),
    # ---- the NCCL of torch 2.15 ----
    "a name of NCCL is unknown": Lifetime(
        SeededFault("comm.group:backend_name", "name in _NCCL_NAMES", 'name == "nccl"'),
        lifetimes.named,
        (),
        2,
        "nccl2",
    ),
    "the name of a backend has to be one of Python's": Lifetime(
        SeededFault(
            "layout.gather:direct_indices",
            'if not backend or any(sign in backend for sign in ":, "):',
            "if True:",
        ),
        lifetimes.named,
        (),
        2,
        "nccl-lazy",
    ),
    "a further group is on the device that torch chooses": Lifetime(
        SeededFault("comm.group:new_group", "**_bound_later(like, device),", ""), lifetimes.elsewhere, (), 4, "nccl2"
    ),
    "a further group connects at once": Lifetime(
        SeededFault("_torch.groups:_bound_later", "options.lazy_init = True", "pass"),
        lifetimes.elsewhere,
        (),
        4,
        "nccl2",
    ),
    "data groups are of the other class, without a device": Lifetime(
        SeededFault("comm.data_group:same_group", _MAKES, ".ProcessGroupNCCL2(store, rank, size, options), kinds.NCCL"),
        lifetimes.named,
        (),
        2,
        "nccl2",
    ),
    "data groups are of the other class": Lifetime(
        SeededFault(
            "comm.data_group:same_group",
            _MAKES,
            ".ProcessGroupNCCL2(store, rank, size, options, _indexed(device)), kinds.NCCL",
        ),
        lifetimes.named,
        (),
        2,
        "nccl2",
    ),
}
