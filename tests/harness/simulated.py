"""The device "simulated": memory, streams and events on a machine that has no device, and a watch over their order.

    load()                    compile and register it: `torch.device("simulated")` and `torch.simulated` exist after it
    with watched() as seen:   what runs inside is checked: unordered accesses, memory that is given back too early,
        ...                   synchronisations of the host, bytes that are held
    seen.races                see tests/harness/clocks.py; `seen.check()` raises with both stacks
    seen.waits                each time the host waited for the device, with its stack

Operators run at once, on the host; what is simulated is that they do not. So the watch does not depend on how long
something takes: what is not ordered is found in every run. Messages are in tests/harness/nccl.py.

`load` registers a device for the whole process, which then is one with an accelerator: only processes of the pool
for devices call it (`tests.harness.pool.pool(world, device=True)`).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import types
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.harness.clocks import HOST, Clocks

# The device, and a backend of the shape of NCCL for it (tests/harness/nccl.py).
SOURCES = tuple(Path(__file__).with_name(f"{name}.cpp") for name in ("simulated", "nccl"))
# The allocator of CUDA hands out multiples of this.
ROUNDED_NBYTES = 512
_FRAMES = 14

# ---- the device ------------------------------------------------------------------------------------------------------


def build(folder: Path | None = None) -> Path:
    """The compiled device: made once for each version of its source and of torch, in some ten seconds."""
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    if compiler is None:
        raise RuntimeError("the tests of devices expect a C++ compiler (g++ or c++), found none; install one")
    # Of the user alone: another one's library must not be loaded.
    folder = folder or Path(tempfile.gettempdir()) / f"fullshard-simulated-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise RuntimeError(f"{folder}: expected a folder of this user; remove it")
    root = Path(torch.__file__).parent
    python = sysconfig.get_paths()["include"]
    made_of = b"".join(source.read_bytes() for source in SOURCES) + f"{torch.__version__} {root} {python}".encode()
    key = hashlib.sha256(made_of).hexdigest()[:16]
    library = folder / f"simulated-{key}.so"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            made = library.with_suffix(".making")
            include = root / "include"
            common = [compiler, "-std=c++20", "-O0", "-fPIC", f"-I{include}", f"-I{python}"]
            common += [f"-I{include / 'torch/csrc/api/include'}"]
            common += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
            objects = [made.with_suffix(f".{source.stem}.o") for source in SOURCES]
            # Side by side: each takes some ten seconds.
            running = [
                subprocess.Popen([*common, "-c", str(source), "-o", str(to)], stderr=subprocess.PIPE, text=True)
                for source, to in zip(SOURCES, objects, strict=True)
            ]
            errors = [one.communicate()[1] for one in running]
            for source, one, said in zip(SOURCES, running, errors, strict=True):
                if one.returncode:
                    raise RuntimeError(f"{source.name} does not compile:\n{said[-4000:]}")
            link = [compiler, "-shared", *map(str, objects), "-o", str(made), f"-L{root / 'lib'}"]
            link += ["-lc10", "-ltorch_cpu", "-ltorch_python", f"-Wl,-rpath,{root / 'lib'}"]
            subprocess.run(link, check=True)
            for one_object in objects:
                one_object.unlink()
            made.rename(library)
    return library


class _Access(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_size_t),
        ("start", ctypes.c_int64),
        ("stop", ctypes.c_int64),
        ("writes", ctypes.c_int32),
        ("device", ctypes.c_int32),
    )


_I32, _I64, _PTR = ctypes.c_int32, ctypes.c_int64, ctypes.c_size_t


class _Told(ctypes.Structure):
    _fields_ = (
        ("allocated", ctypes.CFUNCTYPE(None, _PTR, _I64, _I32, _I64)),
        ("freed", ctypes.CFUNCTYPE(None, _PTR, _I64, _I32)),
        ("ran", ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.POINTER(_Access), _I32, _I32, _I64)),
        ("recorded", ctypes.CFUNCTYPE(None, _I64, _I32, _I64)),
        ("waited", ctypes.CFUNCTYPE(None, _I64, _I32, _I64)),
        ("synchronized", ctypes.CFUNCTYPE(None, _I32, _I64, _I32)),
        ("queried", ctypes.CFUNCTYPE(_I32, _I64)),
        ("used", ctypes.CFUNCTYPE(None, _PTR, _I32, _I64)),
    )


class _Device(types.ModuleType):
    """`torch.simulated`, with what `torch.cuda` has of this."""

    Stream = torch.Stream
    Event = torch.Event

    def device_count(self) -> int:
        return 8

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_device(self) -> int:
        return torch.accelerator.current_device_index()

    def set_device(self, device: Any) -> None:
        torch.accelerator.set_device_index(device)

    def current_stream(self, device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream(device)

    def stream(self, stream: Any) -> Any:
        return contextlib.nullcontext() if stream is None else stream

    def synchronize(self, device: Any = None) -> None:
        torch.accelerator.synchronize(device)

    def is_current_stream_capturing(self) -> bool:
        return any(one.stream == torch.accelerator.current_stream() for one in _captures)

    @property
    def graph(self) -> type[graph]:
        return graph

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_rng_state(self, device: Any = None) -> torch.Tensor:  # noqa: ARG002  (the host's generator draws)
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:  # noqa: ARG002
        torch.set_rng_state(state)

    def empty_cache(self) -> None:
        pass

    def memory_allocated(self, device: Any = None) -> int:  # noqa: ARG002  (one device for each process)
        return _HELD.nbytes

    def max_memory_allocated(self, device: Any = None) -> int:  # noqa: ARG002
        return _HELD.peak_nbytes

    def reset_peak_memory_stats(self, device: Any = None) -> None:  # noqa: ARG002
        _HELD.peak_nbytes = _HELD.nbytes


class _Held:
    nbytes = 0
    peak_nbytes = 0
    # By address: bytes, and the line that allocated them; None: not noted. And those of the peak.
    places: dict[int, tuple[int, str]] | None = None
    at_peak: tuple[tuple[int, str], ...] = ()


_HELD = _Held()


@functools.cache
def load() -> None:
    """Register the device in this process. Raises `RuntimeError` without a compiler."""
    path = str(build())
    torch.ops.load_library(path)
    torch.utils.rename_privateuse1_backend("simulated")
    torch._register_device_module("simulated", _Device("torch.simulated"))
    torch.utils.generate_methods_for_privateuse1_backend()
    kernels = torch.library.Library("aten", "IMPL")
    for name in ("convolution", "convolution_backward"):
        kernels.impl(
            f"{name}_overrideable", functools.partial(_convolution, getattr(torch.ops.aten, name)), "PrivateUse1"
        )
    _KEPT.append(kernels)
    library = ctypes.CDLL(path)
    told = _TELLING.told()
    library.simulated_tells(ctypes.byref(told))
    # Threads of autograd may free memory when the interpreter has ended.
    atexit.register(library.simulated_tells, None)
    _KEPT.extend([library, told])


_KEPT: list[Any] = []  # what C++ calls


def _convolution(operator: Any, *args: Any) -> Any:
    """Convolutions, which have a name of their own on devices such as this one; not told to the watch."""
    device = next(a.device for a in args if isinstance(a, torch.Tensor))
    hosts = [on_host(a) if isinstance(a, torch.Tensor) else a for a in args]
    if operator is torch.ops.aten.convolution_backward:
        hosts.insert(3, [hosts[0].shape[1]])  # of the bias
    return tree_map_only(torch.Tensor, lambda t: t.to(device, non_blocking=True), operator(*hosts))


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of `tensor`, of this device, as a tensor of the host. Nothing is told of what reads or writes it."""
    return torch.ops.simulated.on_host(tensor.detach()) if tensor.device.type == "simulated" else tensor


def is_device(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is on this device."""
    return tensor.device.type == "simulated"


def extent(tensor: torch.Tensor) -> tuple[int, int, int]:
    """The allocation of `tensor`, and the bytes of it that it reaches over, [start, stop)."""
    start = tensor.storage_offset() * tensor.itemsize
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.untyped_storage().data_ptr(), start, start + (last + 1) * tensor.itemsize


# ---- what is told ----------------------------------------------------------------------------------------------------


def stream_name(device: int, stream: int) -> str:
    """The actor of a stream in the clocks."""
    return f"stream {stream} of device {device}" if stream else f"the main stream of device {device}"


def current() -> str:
    """The actor of the stream that is current in this thread."""
    stream = torch.accelerator.current_stream()
    return stream_name(stream.device_index, stream.stream_id)


class Watch:
    """What happened inside `watched()`."""

    def __init__(self, *, queries: Callable[[], bool]) -> None:
        self.clocks = Clocks()
        # How often the host waited for the device, by what it did and where.
        self.waits: Counter[tuple[str, tuple[str, ...]]] = Counter()
        # Called with the name of each operator that ran.
        self.listeners: list[Callable[[str], None]] = []
        self.operators: Counter[str] = Counter()
        self._queries = queries

    @property
    def races(self) -> list[Any]:
        """What nothing orders; see `Clocks`."""
        return self.clocks.races

    def check(self) -> None:
        """Raise `AssertionError` with the first races, if any was found."""
        if self.races:
            shown = "\n".join(race.explain() for race in self.races[:3])
            raise AssertionError(f"{len(self.races)} unordered accesses on the device; the first:\n{shown}")


class _Telling:
    """Receives what C++ tells, in its order, whoever tells it: freeing memory may interrupt anything."""

    def __init__(self) -> None:
        self.watch: Watch | None = None
        self._queue: deque[tuple[Any, ...]] = deque()
        self._busy = threading.Lock()

    def told(self) -> _Told:
        kinds = dict(_Told._fields_)
        return _Told(
            kinds["allocated"](self._allocated),
            kinds["freed"](self._freed),
            kinds["ran"](self._ran),
            kinds["recorded"](self._recorded),
            kinds["waited"](self._waited),
            kinds["synchronized"](self._synchronized),
            kinds["queried"](self._queried),
            kinds["used"](self._used),
        )

    def tell(self, act: Callable[..., None], *args: Any) -> None:
        """Call `act(watch, *args)`, after what was told before."""
        if self.watch is None:
            return
        self._queue.append((act, args))
        while self._queue and self._busy.acquire(blocking=False):
            try:
                while self._queue:
                    act, args = self._queue.popleft()
                    if self.watch is not None:
                        act(self.watch, *args)
            finally:
                self._busy.release()

    def _allocated(self, base: int, nbytes: int, device: int, stream: int) -> None:
        if device >= 0:
            _HELD.nbytes += _rounded(nbytes)
            if _HELD.places is not None:
                _HELD.places[base] = _rounded(nbytes), " < ".join(reversed(frames()[-3:])) or "autograd"
                if _HELD.nbytes > _HELD.peak_nbytes:
                    _HELD.at_peak = tuple(_HELD.places.values())
            _HELD.peak_nbytes = max(_HELD.peak_nbytes, _HELD.nbytes)
        owner = stream_name(device, stream) if device >= 0 else HOST
        if self.watch is not None:
            stack = frames()
            self.tell(lambda watch: watch.clocks.allocate(base, nbytes, owner, stack))

    def _freed(self, base: int, nbytes: int, device: int) -> None:
        if device >= 0:
            _HELD.nbytes -= _rounded(nbytes)
            if _HELD.places is not None:
                _HELD.places.pop(base, None)
            self.tell(lambda watch: watch.clocks.free(base))
        else:
            # Page-locked memory is kept by its allocator until the copies that it knows of are over.
            self.tell(lambda watch: watch.clocks.forget(base))

    def _ran(self, op: bytes, accesses: Any, count: int, device: int, stream: int) -> None:
        if self.watch is None:
            return
        name = op.decode().removeprefix("aten::")
        found = [(a.base, a.start, a.stop, bool(a.writes)) for a in accesses[:count]]
        actor, stack = stream_name(device, stream), frames()
        self.tell(_note_accesses, name, found, actor, stack)
        if name == "item" or name.endswith("waiting"):
            self.tell(_note_wait, name, actor.__eq__, stack)
        for listener in list(self.watch.listeners):
            listener(name)

    def _recorded(self, event: int, device: int, stream: int) -> None:
        if _captures:
            _captures[-1].records(event, stream)
        self.tell(lambda watch: watch.clocks.record(event, stream_name(device, stream)))

    def _waited(self, event: int, device: int, stream: int) -> None:
        if _captures:
            _captures[-1].waits(event, stream)
        self.tell(lambda watch: watch.clocks.wait_event(stream_name(device, stream), event))

    def _synchronized(self, kind: int, which: int, device: int) -> None:
        if _captures:
            _captures[-1].refuses("synchronize")
        if self.watch is None:
            return
        stack = frames()
        if kind == 1:
            self.tell(_note_wait_for_event, which, stack)
        elif kind == 0:
            self.tell(_note_wait, "stream.synchronize", stream_name(device, which).__eq__, stack)
        else:
            self.tell(_note_wait, "synchronize", lambda _: True, stack)

    def _used(self, base: int, device: int, stream: int) -> None:
        self.tell(lambda watch: watch.clocks.use(base, stream_name(device, stream)))

    def _queried(self, event: int) -> int:
        if _captures:
            _captures[-1].refuses("event.query")
            return -1
        watch = self.watch
        if watch is None:
            return 1
        if not watch._queries():
            return 0
        # What the thread of the guard's watch learns orders nothing that the program does.
        thread = threading.current_thread()
        if thread is threading.main_thread() or isinstance(thread, threading._DummyThread):
            self.tell(lambda watch: watch.clocks.wait_event(HOST, event))
        return 1


class graph:  # noqa: N801  (torch.cuda's name)
    """As `torch.cuda.graph` in the mode "global": while it is entered, no thread may ask for an event or wait for the
    device, and what is captured waits for nothing outside. `broken`: what did, which ends the capture on hardware.
    Nothing is captured: operators run."""

    default_capture_stream: torch.Stream | None = None

    def __init__(self, stream: torch.Stream | None = None) -> None:
        if stream is None:
            stream = graph.default_capture_stream = graph.default_capture_stream or torch.Stream(device="simulated")
        self.stream = stream
        self.broken: list[str] = []
        # Streams that a wait brought into the capture, and events that were recorded on them in it.
        self._streams, self._events = {stream.stream_id}, set[int]()

    def records(self, event: int, stream: int) -> None:
        (self._events.add if stream in self._streams else self._events.discard)(event)

    def waits(self, event: int, stream: int) -> None:
        if event in self._events:
            self._streams.add(stream)
        elif stream in self._streams:
            self.broken.append("a wait for work outside of the capture")

    def refuses(self, what: str) -> None:
        self.broken.append(f"{what} of {threading.current_thread().name}")

    def __enter__(self) -> graph:
        torch.accelerator.synchronize()
        self.stream.__enter__()
        _captures.append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        _captures.remove(self)
        self.stream.__exit__(None, None, None)


_captures: list[graph] = []
_TELLING = _Telling()


def _note_accesses(watch: Watch, name: str, found: list[Any], actor: str, stack: tuple[str, ...]) -> None:
    watch.operators[name] += 1
    # All reads of an operator come before its writes, and it does not race with itself.
    for base, start, stop, writes in sorted(found, key=lambda access: access[3]):
        watch.clocks.access(base, start, stop, actor, writes=writes, what=name, stack=stack)


def _note_wait_for_event(watch: Watch, event: int, stack: tuple[str, ...]) -> None:
    # An event that the host knows to be over takes no time.
    if not watch.clocks.knows(HOST, event):
        _note_wait(watch, "event.synchronize", lambda _: False, stack)
        watch.clocks.wait_event(HOST, event)


def _note_wait(watch: Watch, what: str, actors: Callable[[str], bool], stack: tuple[str, ...]) -> None:
    watch.waits[what, stack] += 1
    watch.clocks.synchronize(actors)


@contextlib.contextmanager
def places() -> Iterator[Callable[[], list[tuple[str, int]]]]:
    """Note where memory is allocated inside. Gives a function: bytes at the last peak by place, largest first."""

    def found() -> list[tuple[str, int]]:
        nbytes = Counter[str]()
        for size, place in _HELD.at_peak:
            nbytes[place] += size
        return nbytes.most_common()

    _HELD.places, _HELD.at_peak = {}, ()
    try:
        yield found
    finally:
        _HELD.places = None


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ROUNDED_NBYTES) * ROUNDED_NBYTES


def frames() -> tuple[str, ...]:
    """Where this thread is, without the harness and torch: "file:line function", innermost last."""
    found: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < _FRAMES:
        code = frame.f_code
        known = _lines.get(id(code)) or _lines.setdefault(id(code), _Lines(code))
        if known.file:
            line = frame.f_lineno
            shown = known.shown.get(line) or known.shown.setdefault(line, f"{known.file}:{line} {code.co_qualname}")
            found.append(shown)
        frame = frame.f_back
    return tuple(reversed(found))


class _Lines:
    """How the lines of `code` are shown; `file` is empty for code of the harness and torch. `frames` is called at each
    operator, so it makes no text twice."""

    def __init__(self, code: types.CodeType) -> None:
        self.code = code  # held, so that no other code gets its id
        self.file, self.shown = "", dict[int, str]()
        file = code.co_filename
        if "/torch/" not in file and not file.startswith("<") and not file.endswith(_OWN_FILES):
            file = file.rpartition("/src/")[2]
            _, inside, after = file.rpartition("/tests/")
            self.file = f"tests/{after}" if inside else file


_lines: dict[int, _Lines] = {}
_OWN_FILES = ("harness/simulated.py", "harness/nccl.py", "contextlib.py")


_IS_PINNED = torch.ops.aten.is_pinned.default


class _HostAccesses(TorchDispatchMode):
    """Notes what operators on the host read and write of page-locked memory, which copies may still be using."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ARG002
        kwargs = kwargs or {}
        # Operators on the device tell of themselves, with the page-locked memory that they touch.
        tensors = list(_tensors((*args, *kwargs.values())))
        if tensors and not any(map(is_device, tensors)) and func.namespace == "aten" and not _touches_nothing(func):
            written = {id(t) for a, v in _arguments(func, args, kwargs) if a for t in tree_leaves(v)}
            found = []
            for leaf in tensors:
                tensor = getattr(leaf, "_local_tensor", leaf)
                if tensor.device.type == "cpu" and tensor.numel() and tensor.is_pinned():
                    found.append((*extent(tensor), id(leaf) in written))
            if found:
                _TELLING.tell(_note_accesses, f"{func.__name__} on the host", found, HOST, frames())
        return func(*args, **kwargs)


def _tensors(arguments: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among the arguments of an operator."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from _tensors(argument)


def _arguments(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[bool, Any]]:
    for number, argument in enumerate(func._schema.arguments):
        written = argument.alias_info is not None and argument.alias_info.is_write
        if number < len(args):
            yield written, args[number]
        elif argument.name in kwargs:
            yield written, kwargs[argument.name]


@functools.cache
def _touches_nothing(func: Any) -> bool:
    """Whether an operator asks for a fact, or returns a view."""
    infos = [argument.alias_info for argument in func._schema.arguments]
    return func is _IS_PINNED or any(info is not None and not info.is_write for info in infos)


@contextlib.contextmanager
def watched(*, queries: Callable[[], bool] = lambda: True) -> Iterator[Watch]:
    """Watch this process. `queries`: what `event.query()` says. Allocations made before are not known, and not
    checked."""
    load()
    watch = Watch(queries=queries)
    _TELLING.watch = watch
    try:
        with _HostAccesses():
            yield watch
    finally:
        _TELLING.watch = None
