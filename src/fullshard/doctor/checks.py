"""The table of checks. Each reads the facts and yields what is wrong, in words; the table adds why that matters, and
the fix. docs/doctor.md has the same table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from fullshard.observe import Report, UnitReport
from fullshard.observe.report import human

from . import machine
from .facts import Facts

MIB = 1 << 20
# A smaller model is not checked for memory and time: no launch would notice them.
SMALL_MODEL = 64 * MIB
SHARED_MEMORY = 512 * MIB
# A buffer that no GPU has to spare, whatever the model.
LARGE_BUFFER = 256 * MIB

ERROR, WARNING, ADVICE = "error", "warning", "advice"


class Found(NamedTuple):
    """A problem that a check found, with its own fix."""

    what: str
    fix: str


class Check(NamedTuple):
    """`find`: (facts) -> what is wrong, one text for each finding, or a `Found` if its fix is not that of the check."""

    name: str
    severity: str
    find: Callable[[Facts], Iterable[str | Found]]
    why: str
    fix: str


# ---- machine ---------------------------------------------------------------------------------------------------------


def _torch_old(facts: Facts) -> Iterator[str]:
    if machine.version_of(facts.machine.torch) < machine.OLDEST:
        yield f"torch {facts.machine.torch}, expected at least {_dotted(machine.OLDEST)}"


def _torch_new(facts: Facts) -> Iterator[str]:
    if machine.version_of(facts.machine.torch) > machine.NEWEST:
        yield f"torch {facts.machine.torch}, tested up to {_dotted(machine.NEWEST)}"


def _two_versions(facts: Facts) -> Iterator[str]:
    here = facts.machine
    if here.installed and here.installed != here.fullshard:
        yield f"fullshard {here.installed} is installed, and {here.fullshard} was imported"


def _backend(facts: Facts) -> Iterator[str]:
    if "gloo" not in facts.machine.backends:
        yield "this torch has no gloo"
    if facts.machine.devices and "nccl" not in facts.machine.backends:
        yield f"{facts.machine.devices} CUDA devices, and this torch has no NCCL"


def _port(facts: Facts) -> Iterator[str]:
    if not facts.machine.port_is_free:
        yield f"port {facts.machine.port} is in use"


def _shared_memory(facts: Facts) -> Iterator[str]:
    free = facts.machine.shared_memory
    if free is not None and free < SHARED_MEMORY:
        yield f"/dev/shm has {human(free)} free, expected {human(SHARED_MEMORY)}"


def _open_files(facts: Facts) -> Iterator[str]:
    needed = 256 + 4 * facts.world
    if 0 <= facts.machine.open_files < needed:
        yield f"a process may open {facts.machine.open_files} files, and {facts.world} ranks may need {needed}"


# ---- steps -----------------------------------------------------------------------------------------------------------


def _sharded_step(facts: Facts) -> Iterator[Found]:
    failure = facts.model.steps.sharded_failure
    if failure and facts.model.steps.fails_alone:
        yield Found(f"{failure.stage}: {failure.text}", failure.fix)


def _sharded_step_unsure(facts: Facts) -> Iterator[str]:
    failure = facts.model.steps.sharded_failure
    if failure and not facts.model.steps.fails_alone:
        yield f"{failure.stage}: {failure.text}; in a world of one the step is taken"


def _recomputed_together(facts: Facts) -> Iterator[str]:
    units = {unit.name: _nbytes(unit) for unit in _units(facts)}
    ahead, back = facts.model.steps.open_in_forward, facts.model.steps.open_in_backward
    held = sum(units.get(name, 0) for name in back)
    before = sum(units.get(name, 0) for name in ahead)
    if len(back) > 3 and held >= SMALL_MODEL and held > 2 * before:
        yield f"{len(back)} units are full at once in backward, {human(held)}, and in forward {human(before)}"


def _float16(facts: Facts) -> Iterator[str]:
    if facts.model.half:
        yield f"trainable, and stored in float16: {_some(facts.model.half)}"


def _float16_computed(facts: Facts) -> Iterator[str]:
    names = [_name(unit) for unit in _units(facts) if unit.num_trainable and "float16" in unit.compute_dtypes]
    if not facts.model.half and (names or facts.model.steps.computes_half):
        yield (
            f"units that compute in float16: {_some(names)}"
            if names
            else "forward keeps float16 values for backward (autocast, or a cast of the model's)"
        )


def _large_buffers(facts: Facts) -> Iterator[str]:
    report = facts.model.report
    if report is None or facts.world == 1:
        return
    whole, shards = sum(nbytes for _, nbytes in facts.model.buffers), report.expected.parameters
    largest = facts.model.buffers[0][1] if facts.model.buffers else 0
    if largest >= LARGE_BUFFER or (whole >= SMALL_MODEL and whole > shards / 4):
        shown = [f"{name} {human(nbytes)}" for name, nbytes in facts.model.buffers if nbytes > whole / 10]
        yield f"every rank holds {human(whole)} of buffers beside {human(shards)} of shards: {_some(shown)}"


# ---- axes ------------------------------------------------------------------------------------------------------------


def _axes(facts: Facts) -> Iterator[str | Found]:
    nearest = facts.model.axes.nearest
    for rule in facts.model.axes.broken:
        yield Found(rule, nearest) if nearest else rule


def _axes_step(facts: Facts) -> Iterator[Found]:
    failure = facts.model.axes.failure
    if failure:
        yield Found(f"{failure.stage}: {failure.text}", failure.fix)


# ---- wrapping --------------------------------------------------------------------------------------------------------


def _refused(facts: Facts) -> Iterator[str]:
    if facts.model.refusal and not facts.model.ties_across:
        yield facts.model.refusal


def _nothing_sharded(facts: Facts) -> Iterator[str]:
    axes = facts.model.axes
    if facts.model.report is None and not (facts.model.refusal or axes.broken or axes.failure or axes.apart):
        yield "`shard` called fully_shard for no module"


def _unsharded(facts: Facts) -> Iterator[str]:
    left = facts.model.report.unsharded if facts.model.report else ()
    names = [t.name for t in left if t.kind == "parameter" and t.requires_grad and t.name not in facts.model.ignored]
    if names:
        yield f"trainable, and in no unit: {_some(names)}"


def _root(facts: Facts) -> Iterator[str]:
    for unit in _units(facts):
        own, whole = _nbytes(unit), _model_nbytes(facts)
        if unit.name == "" and whole >= SMALL_MODEL and own > whole / 2:
            yield f"the root holds {human(own)} of {human(whole)}, in no smaller unit"


def _large(facts: Facts) -> Iterator[str]:
    whole = _model_nbytes(facts)
    for unit in _units(facts):
        own = _nbytes(unit)
        if unit.name and (own > 4096 * MIB or (own > 256 * MIB and own > whole / 2)):
            yield f"unit {unit.name} has {human(own)} of {human(whole)} when it is gathered"


def _small(facts: Facts) -> Iterator[str]:
    names = [_name(unit) for unit in _units(facts) if _nbytes(unit) < MIB]
    if len(names) > 3 and _model_nbytes(facts) >= SMALL_MODEL:
        yield f"{len(names)} units are under 1 MiB: {_some(names)}"


def _padding(facts: Facts) -> Iterator[str]:
    for unit in _units(facts):
        padded = unit.padded_local_numel * unit.world
        waste = (padded - unit.numel) * unit.compute_itemsize
        if waste > MIB and padded > 1.25 * unit.numel:
            yield (
                f"unit {_name(unit)} on {unit.world} ranks: {padded - unit.numel:,} elements of padding for "
                f"{unit.numel:,}, {human(waste)}"
            )


# ---- parameters ------------------------------------------------------------------------------------------------------


def _dtypes(facts: Facts) -> Iterator[str]:
    for unit in _units(facts):
        if len(unit.storage_dtypes) > 1:
            yield f"unit {_name(unit)} has parameters in {', '.join(unit.storage_dtypes)}"


def _frozen(facts: Facts) -> Iterator[str]:
    for unit in _units(facts):
        if 0 < unit.num_trainable < unit.num_params:
            yield f"unit {_name(unit)}: {unit.num_params - unit.num_trainable} of {unit.num_params} are frozen"


def _named(field: str, text: str) -> Callable[[Facts], Iterator[str]]:
    """Finds the names in a field of the model's facts, or of a part of them."""

    def find(facts: Facts) -> Iterator[str]:
        if names := attrgetter(field)(facts.model):
            yield f"{text}: {_some(names)}"

    return find


def _unseeded(facts: Facts) -> Iterator[str]:
    yield from _named("unseeded", "other values in a second call of `model`, after equal seeds")(facts)
    yield from _named("seeded_by_rank", "other values on another rank, since `model` seeds by the rank")(facts)


def _optimizer_order(facts: Facts) -> Iterator[str]:
    if facts.model.strays:
        yield f"the optimizer holds {facts.model.strays} tensors that are no parameters of the sharded model"


def _optimizer_misses(facts: Facts) -> Iterator[str]:
    if facts.model.not_optimized and not facts.model.strays:
        yield f"trainable, and not in the optimizer: {_some(facts.model.not_optimized)}"


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def _folder(facts: Facts) -> Iterator[str]:
    if facts.folder and facts.folder.problem:
        yield f"{facts.folder.path} cannot be written: {facts.folder.problem}"


def _space(facts: Facts) -> Iterator[str]:
    folder = facts.folder
    if folder and not folder.problem and folder.free is not None and folder.free < folder.needed:
        yield f"{folder.path} has {human(folder.free)} free, and checkpoints need about {human(folder.needed)}"


def _memory_folder(facts: Facts) -> Iterator[str]:
    if facts.folder and facts.folder.file_system in machine.IN_MEMORY:
        yield f"{facts.folder.path} is on {facts.folder.file_system}"


def _one_machine(facts: Facts) -> Iterator[str]:
    here = facts.machine.devices or max(facts.machine.cores, 8)
    kind = facts.folder.file_system if facts.folder else ""
    if kind and facts.world > here and not kind.startswith((*machine.SHARED, *machine.IN_MEMORY)):
        yield f"{facts.folder and facts.folder.path} is on {kind}, and {facts.world} ranks are several machines"


# ---- the probe -------------------------------------------------------------------------------------------------------


def _processes(facts: Facts) -> Iterator[str]:
    if facts.measured.failure:
        yield f"{facts.world} processes of this machine sent no messages: {facts.measured.failure}"


def _slow_axis(facts: Facts) -> Iterator[str]:
    speed = {axis.name: axis.all_gather for axis in facts.measured.axes}
    if len(speed) == 2 and speed["shard"] < speed["replicate"] / 4:
        yield (f"the axis shard receives about {rough(speed['shard'])}, the axis replicate {rough(speed['replicate'])}")


def _host_bound(facts: Facts) -> Iterator[str]:
    step, host = facts.measured.step, facts.measured.host
    units = len(_units(facts))
    if step and host and host * units > step and _model_nbytes(facts) >= SMALL_MODEL:
        yield (
            f"{units} units take the host about {seconds(host)} each, forward and backward of the plain model about "
            f"{seconds(step)}"
        )


def _communication_bound(facts: Facts) -> Iterator[str]:
    step, needed = facts.measured.step, messages(facts)
    if step and needed > step and _model_nbytes(facts) >= SMALL_MODEL:
        yield (
            f"messages of a step take about {seconds(needed)}, forward and backward of the plain model about "
            f"{seconds(step)}"
        )


def messages(facts: Facts) -> float:
    """Seconds that the messages of a step take at the measured bandwidth of the axis shard; 0 if not measured."""
    axis = next((axis for axis in facts.measured.axes if axis.name == "shard"), None)
    if axis is None or facts.model.report is None:
        return 0.0
    gathered = reduced = 0
    for unit, times in zip(facts.model.report.units, facts.model.gathers, strict=True):
        arriving = unit.padded_local_numel * (unit.world - 1)
        gathered += arriving * unit.compute_itemsize * times
        reduced += arriving * unit.reduce_itemsize * (unit.num_trainable > 0)
    return gathered / axis.all_gather + reduced / axis.reduce_scatter


# ---- words -----------------------------------------------------------------------------------------------------------


def _units(facts: Facts) -> Sequence[UnitReport]:
    report: Report | None = facts.model.report
    return [unit for unit in report.units if unit.num_params] if report else []


def _nbytes(unit: UnitReport) -> int:
    return unit.numel * unit.compute_itemsize


def _model_nbytes(facts: Facts) -> int:
    return sum(_nbytes(unit) for unit in _units(facts))


def _name(unit: UnitReport) -> str:
    return unit.name or "root"


def _some(names: Sequence[str], shown: int = 4) -> str:
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def seconds(value: float) -> str:
    """One digit, since a short probe knows no more.

    >>> seconds(0.0123), seconds(4.56), seconds(0.00068)
    ('10 ms', '5 s', '0.7 ms')
    """
    return f"{float(f'{value:.1g}'):g} s" if value >= 1 else f"{float(f'{value * 1e3:.1g}'):g} ms"


def rough(bandwidth: float) -> str:
    """One digit of bytes per second.

    >>> rough(1.26e9)
    '1 GB/s'
    """
    return f"{float(f'{bandwidth / 1e9:.1g}'):g} GB/s"


# ---- the table -------------------------------------------------------------------------------------------------------

CHECKS: tuple[Check, ...] = (
    Check("torch-old", WARNING, _torch_old,
          "private parts of torch may be missing or differ, and no training was recorded with it",
          f"pip install 'torch>={_dotted(machine.OLDEST)}'"),
    Check("torch-new", ADVICE, _torch_new,
          "private parts of torch may have changed",
          "take the tested torch, or run `fullshard verify` first"),
    Check("two-versions", WARNING, _two_versions,
          "other processes or machines may import the other one, and ranks would not agree",
          "install one version everywhere, and look at PYTHONPATH"),
    Check("backend", ERROR, _backend,
          "ranks cannot send messages, or checkpoints and small messages on the host cannot be agreed on",
          "install a torch that was built with it"),
    Check("network", ERROR, lambda facts: filter(None, (facts.machine.loopback, facts.machine.interface)),
          "processes of this machine cannot reach each other",
          "bring the interface up, or correct the variable; `ip addr` lists the interfaces"),
    Check("port", WARNING, _port,
          "torchrun's rendezvous needs it, or meets another job there",
          "set MASTER_PORT, or give torchrun --standalone or another --master-port"),
    Check("shared-memory", WARNING, _shared_memory,
          "NCCL between devices of a machine and DataLoader's workers fail when it is full",
          "start the container with --ipc=host or --shm-size=8g"),
    Check("open-files", WARNING, _open_files,
          "gloo connects every pair of ranks, and each connection is an open file",
          "ulimit -n 65536 in the shell that launches"),
    Check("step", ERROR, lambda facts: filter(None, [facts.model.steps.plain_failure]),
          "sharded training calls the model in the same way, and would fail in the same way",
          "correct `model`, `loss` or `batch` of the program"),
    Check("sharded-step", ERROR, _sharded_step,
          "a step of the sharded model raised this, and the launch would end with it",
          "the text says what to do"),
    Check("sharded-step-unsure", WARNING, _sharded_step_unsure,
          "other ranks' values are missing here, so that it may be no fault; if it is one, the launch ends with it",
          "take a step in processes: `fullshard verify` with two ranks"),
    Check("partial-read", WARNING, _named("steps.partial_reads", "a number of this rank's rows, read as that of all"),
          "each rank gets another number: a norm too small by the root of the ranks, and ranks that part at an `if`",
          "fullshard.grad_stats(model) for gradients, fullshard.clip_grad_norm_ to clip, .full_tensor() before a read"),
    Check("batch-changes", WARNING, _named("steps.unsteady_batch", "other values when `batch` is asked again for it"),
          "`fullshard verify` and a run that continues would train with other data than they compare with",
          "draw from torch.Generator().manual_seed(index), copy what a step writes to, and read data by index"),
    Check("unseeded-model", WARNING, _unseeded,
          "ranks begin with different weights: the first forward raises, or trains a mixture of all ranks' models",
          "draw from torch's global generator, or from one with a fixed seed; not from the time or the rank, by which "
          "dropout may be seeded after `model`"),
    Check("drifting-buffers", WARNING, _named("steps.drifting_buffers", "different on ranks with different batches"),
          "nothing averages them: evaluation and checkpoints use the statistics of one rank's data",
          "nn.SyncBatchNorm.convert_sync_batchnorm(model) before sharding, or "
          "fullshard.sync_module_states(model, buffers_only=True) before evaluation and checkpoints"),
    Check("recomputed-together", WARNING, _recomputed_together,
          "one checkpoint (recomputation) is around all of them: its backward needs the memory of the whole, unsharded",
          "put a checkpoint around each unit or into it, not around several"),
    Check("float16", WARNING, _float16,
          "updates below a two-thousandth of a value are lost, and a GradScaler refuses float16 gradients",
          "store float32, and compute in another dtype with mp_policy=MixedPrecisionPolicy(param_dtype=...)"),
    Check("float16-scaler", ADVICE, _float16_computed,
          "gradients below 6e-8 become zero without loss scaling, which is in the loop and not seen here",
          "scale the loss with torch.amp.GradScaler, or take bfloat16"),
    Check("large-buffers", WARNING, _large_buffers,
          "buffers are not sharded: they stay whole in the memory of each rank",
          "make them smaller, compute them in forward (masks, tables), or make them parameters without gradients"),
    Check("axes", ERROR, _axes,
          "prepare_fully_shard raises this before it changes the model",
          "the text says what to do"),
    Check("axes-step", ERROR, _axes_step,
          "a step of the model whose layers are divided raised this, and the launch would end with it",
          "the text says what to do"),
    Check("axes-narrowed", ERROR, _named("axes.narrowed", "works on this rank's part of the features alone"),
          "no layer adds what the other ranks have: the numbers are wrong, and nothing raises",
          "write view(batch, tokens, -1, head_dim) and not the number of heads; or give the layer before it the style "
          "column->whole, or keep"),
    Check("refused", ERROR, _refused,
          "fully_shard raised this, and would at the launch",
          "the text says what to do"),
    Check("nothing-sharded", ERROR, _nothing_sharded,
          "every rank would hold the whole model and train it alone",
          "correct `shard`: it matches no module, or leave it out for the default"),
    Check("unsharded", ERROR, _unsharded,
          "their gradients are not averaged, so that ranks drift apart without a word",
          "call fully_shard for the model itself last; what is meant to stay out goes into ignored_params"),
    Check("ties", ERROR, lambda facts: facts.model.ties_across,
          "a parameter belongs to one unit: fully_shard refuses this, and would at the launch",
          "shard the modules together, fully_shard([a, b]), or leave both to the root"),
    Check("root", WARNING, _root,
          "the root is full from the first forward to the last backward, and nothing overlaps with its all-gather",
          "shard the blocks before the model"),
    Check("large-unit", WARNING, _large,
          "two units are full at once: the peak of memory is that of the largest, and less overlaps",
          "shard its inner modules first"),
    Check("small-units", ADVICE, _small,
          "each unit costs two all-gathers and a reduction, whose latency does not shrink with it",
          "shard larger modules: whole blocks"),
    Check("padding", WARNING, _padding,
          "padding is allocated, gathered and reduced like parameters",
          "shard another dim with shard_placement_fn, take fewer shard ranks (HSDP), or join small units"),
    Check("dtypes", ADVICE, _dtypes,
          "each dtype is a group with messages of its own",
          "build the model in one dtype, and compute in another with mp_policy; or shard what differs by itself"),
    Check("frozen", ADVICE, _frozen,
          "frozen parameters are gathered with the trainable ones again in backward, though few need it",
          "shard frozen modules by themselves; for adapters (LoRA) the mix is usual"),
    Check("meta", WARNING, _named("meta", "on the meta device"),
          "they have no values, and the first forward is refused",
          "after fully_shard: fullshard.materialize(model) or fullshard.load_pretrained(model, folder)"),
    Check("uninitialised", ERROR, _named("uninitialised", "never written, NaN or inf"),
          "training begins with what the memory held, on every rank something else, or with NaN",
          "initialise them where they are made; lazy modules: one forward before sharding"),
    Check("meta-buffers", WARNING, _named("meta_buffers", "not persistent, and on the meta device"),
          "no checkpoint has their values",
          "compute them in the module's reset_parameters, or build them on the CPU"),
    Check("changed-buffers", WARNING, _named("steps.changed_buffers", "not persistent, and changed by a step"),
          "they are in no checkpoint: a run that continues begins with other values",
          "register_buffer(..., persistent=True), unless it is a cache that forward makes again"),
    Check("optimizer-order", ERROR, _optimizer_order,
          "fully_shard puts new parameters on the modules: the optimizer would step the old ones, and nothing trains",
          "build the optimizer from the parameters that `optimizer` is given, or call rebind_optimizer"),
    Check("optimizer-misses", WARNING, _optimizer_misses,
          "their gradients are computed and reduced, and never used",
          "give them to the optimizer, or freeze them before sharding"),
    Check("checkpoints", ERROR, _folder,
          "the first save would fail, after the steps that it was to keep",
          "make the folder writable, or take another one"),
    Check("checkpoint-space", ERROR, _space,
          "a new checkpoint is complete before an old one is removed; without room, the save fails",
          "free space, keep fewer (checkpoint.keep_last), or take another folder"),
    Check("checkpoint-memory", WARNING, _memory_folder,
          "checkpoints there take memory from training, and are lost with the machine",
          "take a folder on a disk"),
    Check("checkpoint-shared", WARNING, _one_machine,
          "every rank writes its part into one folder, which all machines must see",
          "take a folder on a file system of the cluster"),
    Check("processes", ERROR, _processes,
          "ranks on this machine could not train together",
          "the text says what failed; GLOO_SOCKET_IFNAME and the firewall are usual causes"),
    Check("slow-axis", ADVICE, _slow_axis,
          "the axis shard carries each parameter up to three times a step, the axis replicate one gradient shard",
          "put the ranks of a shard group on one machine: the last dim of the mesh is the inner one"),
    Check("host-bound", ADVICE, _host_bound,
          "the host issues work more slowly than it is computed, here on the CPU, more so on a device",
          "larger units, larger batches, or more work in each step"),
    Check("communication-bound", ADVICE, _communication_bound,
          "messages cannot overlap with so little computation",
          "larger batches or accumulation, mp_policy in bfloat16, or fewer shard ranks (HSDP)"),
)  # fmt: skip
