"""The rules: one function per event, which returns the resulting commands and updates the records.

Only this module decides what to unshard, reshard or reduce; it has no tensors, streams or hooks. From top to bottom it
follows a training step. [Rn] marks a rule; `tests/harness/mutate.py` breaks each of them and expects a test to fail.
Without forward prefetch (`prefetch_depth` 0) the order of unshard, wait, reshard and reduce is that of FSDP2, tested
against recorded traces (tests/golden).
"""

from __future__ import annotations

from collections.abc import Sequence

from . import optional
from .events import Command
from .record import (
    Full,
    Owed,
    Phase,
    Pins,
    RunRecord,
    Sending,
    UnitRecord,
    Use,
    begin_forward,
    begin_use,
    end_forward,
    end_sending,
    end_use,
    next_in_backward,
    next_in_forward,
    pin,
    settle,
    settle_pins,
    visit,
)

Commands = list[Command]
# Instead of a rule, for commands that a call of the user's asked for.
CALLED = "called"
_NOTHING: Commands = []
# States from which an all-gather can start, and states that the end of a backward frees.
_UNSHARDED_FROM = (Full.SHARDED, Full.SECONDARY)
_SENDING = ("reduce", "accumulate")
_RESHARDED_FROM = (Full.FULL, Full.SHELVED, Full.SECONDARY)


# ---- forward ------------------------------------------------------------------------------------------------


def pre_forward(
    run: RunRecord,
    unit: UnitRecord,
    *,
    in_backward: bool = False,
    nested: bool = False,
    stale: bool = False,
    grad: bool = True,
) -> Commands:
    """`in_backward`: a backward is running, so this is recomputation. `nested`: another forward of the unit is running,
    or it had its only use. `stale`: shards were written since the gather. `grad`: a backward may follow."""
    commands: Commands = []
    if in_backward and unit.in_backward:
        # [R1] Recomputation after the backward of the unit began: the backward of another use may have freed the unit,
        # so unshard it again. It is not a new use, so nothing else changes.
        if unit.phase is Phase.DONE and unit.plan.frees_late:
            # [R36] That backward needs the frozen weights again until its end.
            unit.phase = Phase.BACKWARD
        _make_full(unit, commands, "R1")
        return commands
    if nested:
        # [R21] A method that calls forward, or recursion: part of the outer use, whose end frees the weights.
        _make_full(unit, commands, "R21")
        if unit.joining is not None and not in_backward and optional.is_second(unit):
            # [R40] Part of its only use, which is over: the unit was kept, and is kept again until this one ends.
            unit.joining.again += 1
            unit.pins.running = True
        return commands
    if unit.joining is not None and not in_backward:
        # [R41] What this rank left out has its place before this unit.
        for other in optional.skipped_before(run, unit):
            _skip(run, other, commands)
        optional.begins(run, unit)
    if run.forward_root is None and not in_backward:
        run.forward_root = unit
        if run.open_passes:
            _close_passes(run, but=unit)
        begin_forward(run, unit)
        if unit.joining is not None:
            optional.begin_outermost(run, unit, grad=grad)
    unit.phase = Phase.FORWARD
    unit.pins.running = True
    if stale:
        # [R2] Full parameters, present or in flight, are stale once their shards changed.
        _throw_away(unit, commands, "R2")
    _make_full(unit, commands)
    if not in_backward and not unit.pass_open:
        begin_use(run, unit)
    # [R3] Prefetches are issued before the compute that hides them, in the order in which they will be needed.
    ahead = unit.plan.forward_prefetch if in_backward else next_in_forward(run, unit)
    _unshard_ahead(ahead, commands, "R3")
    return commands


def post_forward(
    run: RunRecord,
    unit: UnitRecord,
    *,
    in_backward: bool = False,
    inputs: bool = True,
    outputs: bool = True,
    nested: bool = False,
    more: bool = False,
    opaque: bool = False,
) -> Commands:
    """`outputs`: some output requires a gradient, so that a backward through this forward may come. `inputs`: some
    input does too, so that `inputs_reached` will follow; traces show it, no rule asks. `more`: the unit has modules
    that did not run in this pass. `opaque`: the graph that was recorded does not report which weights it reads
    (transforms)."""
    commands: Commands = []
    if in_backward and unit.in_backward:
        # [R4] Recomputation: its backward needs the parameters at once. It may have begun before that backward.
        if not nested:
            unit.pins.running = False
        return commands
    if nested:
        if unit.joining is not None and unit.joining.again:
            unit.joining.again -= 1
            if not unit.joining.again:
                unit.pins.running = False
                _end_use(run, unit, commands, outputs=outputs, placed=True)
        return commands
    if unit.joining is not None and not in_backward:
        # [R42] ... and at the latest here.
        for other in optional.skipped_below(run, unit):
            _skip(run, other, commands)
    unit.pins.running = False
    unit.pins.used = unit.pins.used or outputs
    if opaque:
        pin(unit)
    is_forward_root = run.forward_root is unit
    if in_backward:
        if more:
            _open_pass(run, unit, outputs=outputs)
        elif unit.pass_open:
            _close_pass(run, unit)
    else:
        if more and not is_forward_root:
            # [R22] One gather serves all modules of a unit: the remaining ones may be next.
            _open_pass(run, unit, outputs=outputs)
            return commands
        if is_forward_root and run.open_passes:
            _end_passes(run, unit, commands)
        outputs = outputs or unit.pass_outputs
        placed = unit.pass_open and is_forward_root
        # [R24] One module of several that runs alone (the head, for each chunk of a loss) is followed directly by other
        # modules or by its backward. They share its gather and its place in the order.
        waits = more and outputs
        _end_use(run, unit, commands, outputs=outputs, keep=waits, placed=placed)
        if waits:
            _open_pass(run, unit, outputs=outputs)
        elif unit.pass_open:
            _close_pass(run, unit)
    unit.phase = Phase.IDLE
    if is_forward_root:
        run.forward_root = None
        if not in_backward:
            end_forward(run, unit, backward_follows=outputs)
    return commands


def forward_failed(run: RunRecord, unit: UnitRecord, *, in_backward: bool = False, nested: bool = False) -> Commands:
    """The forward of `unit` raised. A caller inside the root's forward may still catch it, so nothing is freed.

    In a backward this is also how recomputation ends once it has what it needs.
    """
    commands: Commands = []
    if not nested:
        unit.pins.running = False
    elif unit.joining is not None and unit.joining.again:
        unit.joining.again -= 1
        unit.pins.running = unit.joining.again > 0
    if not in_backward and not nested:
        unit.phase = Phase.IDLE
        if unit.joining is not None:
            # [R43] A caller that catches it leaves the rest out: others join the whole unit.
            unit.joining.ran = False
        if unit.sending.begins and not unit.pass_open:
            unit.sending.begins.pop()
        if run.forward_root is unit:
            # [R33] A caller that catches it outside of the model must find sharded parameters.
            _show_shards(run, commands)
    return commands


# ---- backward -----------------------------------------------------------------------------------------------


def pre_backward(
    run: RunRecord, unit: UnitRecord, *, use: Use | None = None, create_graph: bool = False, needed: bool = False
) -> Commands:
    """`use`: the forward whose backward begins, if known. `create_graph`: the backward records a graph, whose own
    backward will need the weights again. `needed`: a saved weight is about to be read."""
    commands: Commands = []
    if unit.joining is not None:
        _join_backward(run, unit, commands, use, create_graph=create_graph)
    run.in_backward = True
    if run.ending.active is None:
        run.ending.active = run.ending.manual
    run.keep_full = run.keep_full or create_graph
    unit.in_backward = True
    late = unit.joining is not None and optional.sends_at_end(unit)
    if not unit.empty and not late:
        # [R29] Due messages go before any gather, on every rank, whether or not all gradients arrived.
        _send(run, visit(run, unit, use), commands, "R29")
    # [R25] The user may declare that backward does not read the weights (an embedding). If it does, a watched read
    # unshards them anyway.
    gathers = unit.plan.gathers_in_backward or needed
    if unit.phase is Phase.BACKWARD:
        # [R8] Only the first of several outputs begins the backward, but weights needed again are gathered again.
        if gathers:
            _make_full(unit, commands, "R8")
        return commands
    unit.phase = Phase.BACKWARD
    if gathers:
        _make_full(unit, commands)
    # [R9] The next unit of the backward is gathered while this one computes.
    if not late:
        _unshard_ahead(next_in_backward(run, unit), commands, "R9", in_backward=True)
    return commands


def grads_ready(run: RunRecord, unit: UnitRecord) -> Commands:
    """All gradients of the unit's parameters in this backward arrived."""
    unit.pins.brought = True
    if unit.plan.frees_late and unit.phase is Phase.BACKWARD:
        # [R10] A frozen weight may still be needed, for input gradients or for the backward of an inner unit.
        return _NOTHING
    return _hand_over(run, unit)


def inputs_reached(run: RunRecord, unit: UnitRecord, *, present: bool) -> Commands:
    """The gradients of a use's inputs are complete. `present`: some gradients were not handed over yet."""
    if unit.phase is not Phase.BACKWARD and not present:
        # [R19] They came by another path: this use is not part of the backward, or was handed over already.
        return _NOTHING
    unit.pins.brought = unit.pins.brought or present
    return _hand_over(run, unit)


def backward_end(run: RunRecord, root: UnitRecord, present: Sequence[bool], *, spent: bool = True) -> Commands:
    """The whole backward is over. `present[i]`: units[i] has gradients that were not handed over. `spent`: it brought
    gradients and freed its graph."""
    commands: Commands = []
    if run.open_passes:
        _close_passes(run)
    sent, last = _join_at_end(run, commands) if root.joining is not None else ([], ())
    owing = end_sending(run)
    # [R31] Weights that a graph without reports will read are shelved until its backward.
    aside = [unit for unit in run.units if settle_pins(run, unit, spent=spent, present=present[unit.index])]
    for unit in owing:
        # [R30] In the order in which they owe.
        _reshard_after_backward(run, unit, commands, "R30")
        _send(run, (unit,), commands, "R30")
    for unit in last:
        # [R46] What ranks may run in any order sends last, in one order.
        _send(run, (unit,), commands, "R46")
        sent.append(unit)
    for unit in run.units:
        # [R11] Free units that the backward did not reach, or that recomputation gathered after their gradients; send
        # gradients that came after the message, or that an earlier backward held.
        _reshard_after_backward(run, unit, commands, "R11")
        if present[unit.index] and unit not in owing and unit not in sent:
            _send(run, (unit,), commands, "R11")
        if unit in aside:
            _shelve(unit, commands, "R31")
        # [R32] A forward that differentiates inside continues with its weights.
        unit.phase = Phase.FORWARD if unit.pins.running else Phase.IDLE
        unit.in_backward = False
    if run.ending.ends_step:
        _end_step(run, commands)
    run.in_backward = False
    run.keep_full = False
    if run.ending.is_manual and run.ending.sent:
        # [R38] The user says where messages are waited for. Gradients that were only accumulated are kept now, so that
        # a later backward that fails leaves them.
        return commands
    run.ending.sent = False
    if run.ending.ends_step:
        run.ending.step_is_over()
    # [R37] Messages are waited for, and gradients handed over, where no compute is left that could hide them.
    commands.append(Command("finish", root, "R37"))
    return commands


def backward_failed(run: RunRecord, root: UnitRecord) -> Commands:
    """The backward raised. Like a failed forward, it leaves sharded parameters on the modules [R33]."""
    commands: Commands = []
    _show_shards(run, commands)
    return commands


# ---- the user's calls, and failure --------------------------------------------------------------------------


def finalize(run: RunRecord, root: UnitRecord, present: Sequence[bool]) -> Commands:
    """All backwards of the step are over: send what they kept, in the order of the units. `present[i]`: units[i] has
    gradients to send; `wait_finalize` waits for them."""
    commands: Commands = []
    for unit in run.units:
        # [R39] What the settings are now decides: schedules switch synchronisation and resharding on for this call.
        _reshard_after_backward(run, unit, commands, "R39")
        if present[unit.index]:
            _send(run, (unit,), commands, "R39")
    _end_step(run, commands)
    run.ending.waits = True
    return commands


def wait_finalize(run: RunRecord, root: UnitRecord) -> Commands:
    """The user waits for the reductions that `finalize` left under way."""
    run.ending.step_is_over()
    return [Command("finish", root, "R37")]


def unshard(run: RunRecord, unit: UnitRecord, *, stale: bool = False) -> Commands:
    """Issue the all-gather; `wait_unshard` makes it usable."""
    commands: Commands = []
    if stale:
        _throw_away(unit, commands, "R2")
    _unshard_ahead((unit,), commands, CALLED)
    return commands


def wait_unshard(run: RunRecord, unit: UnitRecord) -> Commands:
    """The user needs the full parameters now. Nothing to do if a forward used and freed them in between."""
    commands: Commands = []
    if unit.full not in _UNSHARDED_FROM:
        _make_full(unit, commands, CALLED)
    return commands


def reshard(run: RunRecord, unit: UnitRecord) -> Commands:
    """Free the full parameters, except in a forward of a unit that stays full (as FSDP2)."""
    commands: Commands = []
    if unit.phase is Phase.FORWARD and not unit.plan.reshard_after_forward:
        return commands
    _throw_away(unit, commands, CALLED)
    return commands


def reset(run: RunRecord, root: UnitRecord) -> Commands:
    """[R14] A step did not finish: discard all of its leftovers."""
    commands: Commands = []
    _close_passes(run)
    for unit in run.units:
        _throw_away(unit, commands, "R14")
        unit.phase = Phase.IDLE
        unit.in_backward = False
        unit.uses.clear()
        unit.pins = Pins()
        unit.sending = Sending()
        if unit.joining is not None:
            unit.joining.ran, unit.joining.again = False, 0
    run.order.clear()
    run.order_mark = 0
    run.owed = Owed()
    run.forward_root = None
    run.forward_log = []
    # [R15] A half-recorded order is no plan.
    run.forward_plan = []
    run.forward_plans.clear()
    run.in_backward = False
    run.keep_full = False
    run.ending.step_is_over()
    run.generation += 1
    commands.append(Command("reset", root, "R14"))
    return commands


# ---- shared by the rules ------------------------------------------------------------------------------------


def _end_use(
    run: RunRecord, unit: UnitRecord, commands: Commands, *, outputs: bool, keep: bool = False, placed: bool = False
) -> None:
    """A use of `unit` is over. `keep`: it stays full. `placed`: the use is in the order already."""
    if unit.full is Full.FULL and not keep:
        if unit.pins.count and (unit.plan.reshard_after_forward or not outputs):
            # [R31] A later backward reads it without a report.
            _shelve(unit, commands, "R31")
        elif unit.plan.resident:
            # [R34] There is memory for it until its backward. Where none comes, users must find shards, as in R6.
            if not outputs:
                _shelve(unit, commands, "R34")
        elif unit.plan.reshard_after_forward and unit.plan.keeps_secondary:
            # [R26] Keep a secondary shard, so that backward gathers from the few ranks of a block instead of all.
            unit.full = Full.SECONDARY
            commands.append(Command("reshard_secondary", unit, "R26"))
            if not outputs:
                # [R27] Until the next forward or recomputation, users must find sharded parameters, as in R6.
                commands.append(Command("shelve", unit, "R27"))
        elif unit.plan.reshard_after_forward:
            # [R5] Only the running units hold full memory.
            _reshard(unit, commands, "R5")
        elif not outputs and unit.plan.keeps_in_evaluation:
            # [R6] No backward will free it. Users must find sharded parameters (an optimizer may be built now), but the
            # next forward reuses the memory, as requested.
            _shelve(unit, commands, "R6")
        elif not outputs:
            # [R20] It was kept only for a backward, and none comes. Freed parameters cannot become stale.
            _reshard(unit, commands, "R20")
    if not unit.empty and not placed:
        # [R7] Backward visits uses in reverse, so each use has its own place in the order.
        unit.uses.append(len(run.order))
        run.order.append(unit)
        end_use(run, unit)
        if unit.joining is not None:
            optional.ends(run, unit, unit.sending.open[-1])


def _skip(run: RunRecord, unit: UnitRecord, commands: Commands) -> None:
    """This rank leaves `unit` out: its forward, as on the ranks that run it, without computing anything."""
    assert unit.joining is not None
    commands += pre_forward(run, unit, stale=unit.joining.is_stale)
    commands += post_forward(run, unit, outputs=run.owed.optional.records)


def _join_backward(
    run: RunRecord, unit: UnitRecord, commands: Commands, use: Use | None, *, create_graph: bool
) -> None:
    """The backward reached `use` of `unit`."""
    if not run.in_backward:
        optional.begin_visits(run)
    for other, left in optional.left_before(run, unit, use):
        # [R44] Younger uses that this rank left out, or that its loss does not reach.
        _visit_absent(run, other, left, commands, create_graph=create_graph)


def _join_at_end(run: RunRecord, commands: Commands) -> tuple[list[UnitRecord], Sequence[UnitRecord]]:
    """The backward is over. Returns the units that sent, and those that send last."""
    if not run.in_backward:
        optional.begin_visits(run)
    left = optional.left_at_end(run)
    for other, use in left:
        if not optional.sends_at_end(other):
            # [R45] What this rank's backward did not visit.
            _visit_absent(run, other, use, commands)
    sent = [command.unit for command in commands if command.kind in _SENDING]
    last = dict.fromkeys(other for other, _ in left if optional.sends_at_end(other) and other.plan.trainable)
    return sent, list(last)


def _visit_absent(
    run: RunRecord, unit: UnitRecord, use: Use, commands: Commands, *, create_graph: bool = False
) -> None:
    """The backward of `use` of `unit`, as on the ranks that ran it, without gradients."""
    if unit.phase is Phase.BACKWARD:
        commands += _hand_over(run, unit)
    commands += pre_backward(run, unit, use=use, create_graph=create_graph)
    commands += _hand_over(run, unit)


def _open_pass(run: RunRecord, unit: UnitRecord, *, outputs: bool) -> None:
    """Other modules of `unit` may follow in the same use."""
    unit.pass_outputs = unit.pass_outputs or outputs
    if not unit.pass_open:
        unit.pass_open = True
        run.open_passes.append(unit)


def _end_passes(run: RunRecord, root: UnitRecord, commands: Commands) -> None:
    """[R23] The outermost forward, of `root`, is over: do not wait for modules that did not run in it."""
    for unit in [unit for unit in run.open_passes if unit is not root]:
        _end_use(run, unit, commands, outputs=unit.pass_outputs)
        _close_pass(run, unit)
        unit.phase = Phase.IDLE


def _close_pass(run: RunRecord, unit: UnitRecord) -> None:
    """The next forward of `unit` begins a new pass over its modules."""
    unit.pass_open = unit.pass_outputs = False
    run.open_passes.remove(unit)


def _close_passes(run: RunRecord, *, but: UnitRecord | None = None) -> None:
    for unit in [unit for unit in run.open_passes if unit is not but]:
        _close_pass(run, unit)


def _unshard(unit: UnitRecord, commands: Commands, rule: str) -> None:
    """Brings `unit` from SHARDED or SECONDARY to PENDING."""
    # [R28] Secondary shards are gathered from their block: fewer and closer ranks.
    commands.append(Command("unshard_secondary" if unit.full is Full.SECONDARY else "unshard", unit, rule))
    unit.full = Full.PENDING


def _make_full(unit: UnitRecord, commands: Commands, rule: str = "R16") -> None:
    """[R16] From any state to FULL, with only the missing commands."""
    if unit.full in _UNSHARDED_FROM and not unit.empty:
        _unshard(unit, commands, rule)
    if unit.full is Full.PENDING:
        unit.full = Full.FULL
        commands.append(Command("wait", unit, rule))
    elif unit.full is Full.SHELVED:
        unit.full = Full.FULL
        commands.append(Command("expose", unit, rule))


def _unshard_ahead(units: Sequence[UnitRecord], commands: Commands, rule: str, *, in_backward: bool = False) -> None:
    for unit in units:
        if in_backward and not unit.plan.gathers_in_backward:
            continue
        if unit.full in _UNSHARDED_FROM and not unit.empty:
            _unshard(unit, commands, rule)


def _reshard(unit: UnitRecord, commands: Commands, rule: str) -> None:
    unit.full = Full.SHARDED
    commands.append(Command("reshard", unit, rule))


def _shelve(unit: UnitRecord, commands: Commands, rule: str) -> None:
    unit.full = Full.SHELVED
    commands.append(Command("shelve", unit, rule))


def _show_shards(run: RunRecord, commands: Commands) -> None:
    """Put sharded parameters on all modules, except running forwards. Frees and waits for nothing: this rank may be the
    only one that failed, and `reset` does that on all ranks."""
    for unit in run.units:
        if unit.full is Full.FULL and not unit.pins.running:
            _shelve(unit, commands, "R33")
        elif unit.full is Full.SECONDARY:
            commands.append(Command("shelve", unit, "R33"))


def _throw_away(unit: UnitRecord, commands: Commands, rule: str) -> None:
    """Brings `unit` from any state to SHARDED."""
    unit.pins.count = 0
    if unit.full is Full.PENDING:
        unit.full = Full.SHARDED
        commands.append(Command("cancel", unit, rule))
    elif unit.full is not Full.SHARDED:
        _reshard(unit, commands, rule)


def _hand_over(run: RunRecord, unit: UnitRecord) -> Commands:
    """The gradients of a use are complete: free the weights, then send what can go."""
    commands: Commands = []
    unit.phase = Phase.DONE
    # [R17] Weights go before the messages come, so that both need not exist together.
    _reshard_after_backward(run, unit, commands)
    _send(run, settle(run, unit), commands)
    return commands


def _reshard_after_backward(run: RunRecord, unit: UnitRecord, commands: Commands, rule: str = "R17") -> None:
    if unit.full in _RESHARDED_FROM and unit.plan.reshard_after_backward and not _is_held(run, unit):
        if unit.plan.resident and not unit.plan.trainable:
            # [R35] Frozen weights stay valid for the next step; if something writes them, see R2.
            if unit.full is Full.FULL:
                _shelve(unit, commands, "R35")
            return
        _reshard(unit, commands, rule)


def _is_held(run: RunRecord, unit: UnitRecord) -> bool:
    """Whether the weights of `unit` are read after the backward that runs."""
    return run.keep_full or unit.pins.running or unit.pins.count > 0


def _end_step(run: RunRecord, commands: Commands) -> None:
    """No backward of this step follows."""
    for unit in run.units:
        if unit.full is Full.PENDING:
            # [R12] An unused prefetch. Every rank issued it, so every rank waits for it.
            unit.full = Full.SHARDED
            commands.append(Command("cancel", unit, "R12"))
        unit.uses.clear()
        unit.sending.open.clear()
    # [R13] The next forward starts a new order.
    run.order.clear()
    run.owed.optional.starts.clear()
    run.owed.optional.is_over = True


def _send(run: RunRecord, units: Sequence[UnitRecord], commands: Commands, rule: str = "R18") -> None:
    for unit in units:
        # [R18] Gradients are reduced, or accumulated unreduced for a later backward (no_sync).
        run.ending.sent = run.ending.sent or unit.plan.sync
        commands.append(Command("reduce" if unit.plan.sync else "accumulate", unit, rule))
