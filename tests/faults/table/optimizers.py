"""What ranks do to their shards: optimizers, schedules, clipping, scalers, hooks, and the update inside of a guard."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

from tests.faults.actions import Action, no_update, send_signal
from tests.faults.cases import IN_STEP, PLAIN, Case, Equal, Moment, Outcome, Raises, Recovers, Setup, at
from tests.faults.deeds import optimizers as do

# A difference of one step is found in the next one at the latest.
FOUR = Setup(steps=4)
CLIPS = replace(FOUR, clip=True)
SCALES = replace(FOUR, scaler=True)
# Every text says what to do, after a semicolon.
TO_DO = r"; [a-z]+"


def _case(name: str, does: str, expected: Outcome, action: Action, when: Moment = IN_STEP, **more: Any) -> Case:
    """Rank 1 alone does it."""
    struck = (*more.pop("before", ()), at(*when, action, rank=1))
    return Case(f"optimizers/{name}", does, expected, struck, more.pop("setup", FOUR), limit=20.0, **more)


def _fact(name: str, does: str, action: Action, *words: str, **more: Any) -> Case:
    """All ranks are told what differs, on which rank, and what to do."""
    expected = Raises("RanksDisagree", ("rank 1", *words, TO_DO), within=more.pop("within", 5.0))
    return _case(name, does, expected, action, **more)


def _legal(name: str, does: str, action: Action, bound: float = 0.0, **more: Any) -> Case:
    return _case(name, does, Equal("undisturbed", bound), action, **more)


HYPER = (
    _fact("lr", "rank 1 has another learning rate", do.put(lr=0.02), r"\blr\b", r"0\.02", fast=True),
    _fact(
        "lr_first", "rank 1 has another learning rate from the start", do.put(lr=0.02), r"\blr\b", when=(-1, "ready")
    ),
    _fact(
        "lr_of_a_group",
        "rank 1 has another learning rate in one of two groups",
        do.put(1, lr=0.03),
        r"\blr\b",
        r"0\.03",
        setup=replace(FOUR, optimizer=do.two_groups),
    ),
    _fact(
        "lr_on_a_mesh",
        "rank 1 of a 2 x 2 mesh has another learning rate",
        do.put(lr=0.02),
        r"\blr\b",
        setup=replace(FOUR, world=4, options=do.hsdp),
    ),
    _fact(
        "lr_of_three",
        "rank 1 of three has another learning rate",
        do.put(lr=0.02),
        r"\blr\b",
        setup=replace(FOUR, world=3),
    ),
    _fact(
        "lr_with_torch_messages",
        "rank 1 has another learning rate, and messages are as torch's",
        do.put(lr=0.02),
        r"\blr\b",
        setup=replace(FOUR, steps=18, environment=(("FULLSHARD_COMMUNICATION", "torch"),)),
    ),
    _fact(
        "lr_of_replicas",
        "rank 1 has another learning rate, nothing is sharded",
        do.put(lr=0.02),
        r"\blr\b",
        setup=replace(FOUR, how="replicate"),
    ),
    _fact(
        "schedule",
        "rank 1's schedule decays more slowly",
        do.other_schedule,
        r"\blr\b",
        when=(-1, "ready"),
        setup=replace(FOUR, schedule=do.decays(0.5)),
    ),
    _fact(
        "schedule_twice",
        "rank 1's schedule takes two steps in one",
        do.schedule_more,
        r"\blr\b",
        when=(1, "updated"),
        setup=replace(FOUR, schedule=do.decays(0.5)),
    ),
    _fact(
        "schedule_stops",
        "rank 1's schedule takes no more steps",
        do.schedule_less,
        r"\blr\b",
        setup=replace(FOUR, schedule=do.decays(0.5)),
    ),
    _fact("weight_decay", "rank 1 has another weight decay", do.put(weight_decay=0.5), "weight_decay"),
    _fact("betas", "rank 1 has other betas", do.put(betas=(0.5, 0.9)), "betas"),
    _fact("eps", "rank 1 has another eps", do.put(eps=1e-2), "eps"),
    _fact("maximize", "rank 1 maximizes", do.put(maximize=True), "maximize"),
    _fact("amsgrad", "rank 1 has amsgrad", do.make(do.adamw(amsgrad=True)), "amsgrad", when=(-1, "wrapped")),
    _fact(
        "momentum",
        "rank 1 has another momentum",
        do.put(momentum=0.5),
        "momentum",
        setup=replace(FOUR, optimizer=do.momentum),
    ),
    _fact(
        "nesterov",
        "rank 1 has Nesterov's momentum",
        do.put(nesterov=True),
        "nesterov",
        setup=replace(FOUR, optimizer=do.momentum),
    ),
    _fact("class", "rank 1 has Adam where the others have AdamW", do.make(do.adam), r"\bAdamW\b", when=(-1, "wrapped")),
    _fact(
        "subset",
        "rank 1's optimizer has not the parameters of layers.1",
        do.make(do.without_second),
        r"layers\.1",
        when=(-1, "wrapped"),
    ),
    _fact(
        "group_added",
        "rank 1 alone adds the parameters of layers.1 to its optimizer in the middle of training",
        do.add_second,
        r"layers\.1",
        setup=replace(FOUR, optimizer=do.without_second),
    ),
    _fact(
        "groups_exchanged",
        "rank 1 exchanges the learning rates of its two groups",
        do.exchange_rates,
        r"\blr\b",
        setup=replace(FOUR, optimizer=do.two_groups),
    ),
    _legal(
        "groups_turned",
        "rank 1 has its two groups in the other order",
        do.make(do.groups_turned),
        when=(-1, "wrapped"),
        setup=replace(FOUR, optimizer=do.two_groups),
    ),
    _legal(
        "parameters_turned",
        "rank 1's optimizer has its parameters backwards",
        do.make(do.parameters_turned),
        when=(-1, "wrapped"),
    ),
    _legal(
        "foreach",
        "rank 1 updates one parameter after the other",
        do.put(foreach=False),
        2e-5,
        when=(-1, "ready"),
        fast=True,
    ),
    _legal("fused", "rank 1's optimizer is fused", do.make(do.adamw(fused=True)), 2e-5, when=(-1, "wrapped")),
    _legal("lr_as_tensor", "rank 1's learning rate is a tensor", do.make(do.lr_as_tensor), 2e-5, when=(-1, "wrapped")),
)

STATE = (
    _fact(
        "loaded_lr",
        "rank 1 loads its optimizer's state with another learning rate",
        do.load_optimizer(lr=0.02),
        r"\blr\b|load_state_dict",
    ),
    _fact(
        "loaded_optimizer",
        "rank 1 alone loads an older state of its optimizer",
        do.load_optimizer_kept,
        r"load_state_dict|\bsteps?\b",
        when=(2, "step"),
        before=(at(1, "step", do.keep_state),),
        setup=replace(FOUR, steps=5),
    ),
    _fact(
        "loaded_model",
        "rank 1 alone loads an older state of its model",
        do.load_model_kept,
        "load_state_dict|loaded|written",
        when=(2, "step"),
        before=(at(1, "step", do.keep_state),),
        setup=replace(FOUR, steps=5),
        fast=True,
    ),
    _fact("lost_state", "rank 1 loses its optimizer's state", do.lose_state, r"\bsteps?\b|state"),
    _fact("made_anew", "rank 1 makes its optimizer anew", do.made_anew, r"\bsteps?\b|state"),
    _fact(
        "steps_at_zero", "rank 1 sets the counts of its optimizer's state back", do.steps_at_zero, r"\bsteps?\b|state"
    ),
    _fact(
        "one_of_two_left_out",
        "rank 1 leaves out the second of two optimizers",
        do.second_left_out,
        "step|SGD",
        setup=replace(FOUR, optimizer=do.both),
    ),
    _legal(
        "two_turned",
        "rank 1 calls two optimizers of different parameters in the other order",
        do.turned,
        setup=replace(FOUR, optimizer=do.both),
    ),
    _fact(
        "zeros",
        "rank 1 calls zero_grad(set_to_none=False): whether a gradient is zero nobody looks",
        do.zeros,
        "zero_grad",
    ),
    Case(
        "optimizers/loaded_by_all",
        "all ranks load an older state of model and optimizer, and train that step again",
        PLAIN,
        (at(1, "step", do.keep_state), at(2, "step", do.load_all_kept)),
        FOUR,
    ),
)

WRITES = (
    _fact(
        "shards_scaled",
        "rank 1 alone multiplies its shards of layers.1 between two steps",
        do.scaled_shards,
        r"layers\.1",
        "written|changed|version",
    ),
    _fact(
        "average_kept",
        "rank 1 alone puts a running average instead of its parameters",
        do.average_into_model,
        "written|changed|version",
        when=(2, "step"),
        before=(at(0, "step", do.begin_average),),
    ),
    Case(
        "optimizers/average_evaluated",
        "all ranks evaluate with a running average, and put the parameters back",
        Equal(),
        (
            at(0, "step", do.begin_average),
            at(1, "updated", do.update_average),
            at(2, "step", do.average_for_an_evaluation),
        ),
        FOUR,
    ),
    _fact(
        "gradient_scaled",
        "rank 1 alone multiplies gradients of layers.1 before the update",
        do.gradient_scaled,
        r"layers\.1",
        "gradient",
        when=(1, "gradients"),
    ),
    _fact(
        "gradient_gone",
        "rank 1 alone has no gradient of layers.1.up.weight at its update",
        do.gradient_gone,
        r"layers\.1\.up\.weight",
        "gradient",
        when=(1, "gradients"),
    ),
    _fact("hook", "rank 1 alone has a tensor hook of a parameter", do.doubles, r"layers\.1\.up\.weight", "hook"),
    _fact(
        "hook_after", "rank 1 alone has a hook after accumulation of a gradient", do.doubles_after, r"layers\.1", "hook"
    ),
    _fact("step_hook", "rank 1 alone has a hook before its updates", do.step_hook, "hook|gradient"),
    Case("optimizers/hook_of_all", "all ranks have the same tensor hook", PLAIN, (at(1, "step", do.looks),), FOUR),
    Case(
        "optimizers/doubled_by_all",
        "all ranks have a tensor hook that doubles a gradient",
        PLAIN,
        (at(1, "step", do.doubles),),
        FOUR,
    ),
)

SETTINGS = (
    _fact(
        "divide_factor",
        "rank 1 divides its gradients by another factor from step 1 on",
        do.setting("set_gradient_divide_factor", 3.0),
        "divide",
    ),
    _fact(
        "divide_factor_of_sharding",
        "one rank of a 2 x 2 mesh divides what it reduces by another factor",
        do.setting("set_reduce_scatter_divide_factor", 3.0),
        "divide",
        setup=replace(FOUR, world=4, options=do.hsdp),
    ),
    _fact(
        "all_reduce_hook",
        "one rank of a 2 x 2 mesh has an all-reduce hook",
        do.all_reduce_hook,
        "hook",
        setup=replace(FOUR, world=4, options=do.hsdp),
    ),
)

CLIPPING = (
    _fact("clip_norm", "rank 1 clips to another norm", do.clip_with(max_norm=0.01), "max_norm|clip", setup=CLIPS),
    _fact(
        "clip_norm_type",
        "rank 1 clips by another kind of norm",
        do.clip_with(norm_type=1.0),
        "norm_type|clip",
        setup=CLIPS,
    ),
    _fact(
        "clip_inf",
        "rank 1 clips by the largest element",
        do.clip_with(norm_type=float("inf")),
        "norm_type|clip",
        setup=CLIPS,
    ),
    _fact("clip_subset", "rank 1 clips layers.1 alone", do.clip_second, "clip", setup=CLIPS),
    _fact("clip_after", "rank 1 clips after its update", do.clip_after, "clip", setup=CLIPS),
    _fact("clip_twice", "rank 1 clips twice", do.clip_twice, "clip", setup=CLIPS, within=8.0),
    _fact("clip_never", "rank 1 does not clip", do.clip_never, "clip", setup=CLIPS, within=8.0),
    _fact(
        "clip_parts_turned",
        "rank 1 clips two parts of the model in the other order",
        do.clip_parts("layers.1", "layers.0"),
        "clip",
        before=(at(1, "step", do.clip_parts("layers.0", "layers.1")),),
        setup=CLIPS,
    ),
    _case(
        "clip_of_torch",
        "rank 1 clips by torch's function, which sends other messages",
        Raises("RanksDisagree", ("rank 1", "clip", TO_DO), on=(0,), within=8.0),
        do.clip_of_torch,
        setup=CLIPS,
    ),
    _fact(
        "clip_of_replicas",
        "rank 1 clips to another norm, nothing is sharded",
        do.clip_with(max_norm=0.01),
        "max_norm|clip",
        setup=replace(CLIPS, how="replicate"),
    ),
    _legal("clip_foreach", "rank 1 scales one by one", do.clip_with(foreach=False), setup=CLIPS),
    _legal(
        "clip_error_off",
        "rank 1 alone asks for no error of infinite norms, of which there are none",
        do.clip_with(error_if_nonfinite=False),
        setup=CLIPS,
    ),
)

SCALING = (
    _fact(
        "scale",
        "rank 1's scaler begins at another scale",
        do.scaler(init_scale=32.0),
        "scale",
        when=(-1, "ready"),
        setup=SCALES,
    ),
    _fact("scale_set", "rank 1 sets another scale", do.scaler_set, "scale", setup=SCALES),
    _fact("scale_loaded", "rank 1 loads a scaler with another scale", do.scaler_loaded, "scale", setup=SCALES),
    _fact(
        "growth_interval",
        "rank 1's scale grows after each step",
        do.scaler(growth_interval=1),
        "growth|scale",
        when=(-1, "ready"),
        setup=SCALES,
    ),
    _fact(
        "growth_factor",
        "rank 1's scale grows by another factor",
        do.scaler(growth_factor=4.0, growth_interval=1),
        "growth|scale",
        when=(-1, "ready"),
        before=(at(-1, "ready", do.scaler(growth_interval=1), rank=0),),
        setup=SCALES,
    ),
    _fact(
        "backoff_factor",
        "rank 1's scale shrinks by another factor, when all skip an update",
        do.scaler(backoff_factor=0.25),
        "backoff|scale",
        when=(-1, "ready"),
        before=(at(1, "gradients", do.infs_everywhere),),
        setup=SCALES,
    ),
    _fact(
        "scaler_disabled",
        "rank 1's scaler is switched off",
        do.scaler(enabled=False),
        "scale",
        when=(-1, "ready"),
        setup=SCALES,
        within=8.0,
    ),
    _case(
        "scaler_never_updated",
        "rank 1 does not update its scaler, which torch refuses in the next step",
        Raises("PeerFailed", ("rank 1", "update"), on=(0,)),
        do.scaler_never_updated,
        when=(0, "step"),
        setup=SCALES,
    ),
    _legal(
        "unscale",
        "rank 1 unscales before its step, the others in it: the same messages",
        do.unscale,
        when=(1, "gradients"),
        setup=SCALES,
    ),
    _case(
        "unscale_twice",
        "rank 1 unscales twice, which torch refuses",
        Raises("PeerFailed", ("rank 1", "unscale_"), on=(0,)),
        do.unscale_twice,
        when=(1, "gradients"),
        before=(at(1, "gradients", do.unscale, rank=0),),
        setup=SCALES,
    ),
    _legal("scale_logged", "rank 1 alone reads its scale for a log", do.scale_logged, setup=SCALES),
    Case(
        "optimizers/infs_of_all",
        "all ranks skip an update because of infs, and continue with half the scale",
        PLAIN,
        (at(1, "gradients", do.infs_everywhere),),
        SCALES,
    ),
)

STEP_GUARD = Setup(steps=3, catches=4, guard="step")
ENDS = replace(STEP_GUARD, catches=0)


def _guarded(name: str, does: str, event: str, action: Action | None = None, **more: Any) -> Case:
    """All catch it, no rank has taken the step, and all take it again."""
    words = ("rank 1", "injected")
    struck = (at(1, event, action, rank=1),)
    setup = more.pop("setup", STEP_GUARD)
    return Case(f"optimizers/{name}", does, Recovers("PeerFailed", words), struck, setup, limit=20.0, **more)


def _lost(name: str, does: str, action: Action, setup: Setup = STEP_GUARD) -> Case:
    """Some rank has written: who continues all the same is told to load a checkpoint."""
    expected = Raises("RuntimeError", ("load a checkpoint",))
    struck = (at(1, "step", action, rank=1),)
    return Case(f"optimizers/{name}", does, expected, struck, replace(setup, catches=1), limit=20.0)


GUARDED = (
    _guarded("guard_before", "rank 1 raises after its backward, inside a guard of the step", "gradients", fast=True),
    _guarded("guard_backward", "rank 1 raises in backward, inside a guard of the step", "backward layers.1"),
    _guarded(
        "guard_hook",
        "rank 1 raises in a hook before its update, inside a guard of the step",
        "step",
        do.raise_before_update,
    ),
    _guarded(
        "guard_of_three",
        "rank 1 of three raises in a hook before its update, inside a guard of the step",
        "step",
        do.raise_before_update,
        setup=replace(STEP_GUARD, world=3),
    ),
    _lost("guard_after", "rank 1 raises after its update, inside a guard of the step", do.raise_after_update),
    _lost(
        "guard_halfway",
        "rank 1 raises in the middle of its update, inside a guard of the step",
        do.fails_halfway,
        replace(STEP_GUARD, optimizer=do.halfway),
    ),
    Case(
        "optimizers/guard_loaded",
        "rank 1 raises after its update, inside a guard of the step, and all continue from the state before",
        Recovers("RuntimeError", ("rank 1",)),
        (at(1, "step", do.raise_after_update, rank=1),),
        ENDS,
        program=do.loads_and_goes_on,
        limit=20.0,
    ),
    Case(
        "optimizers/guard_uncaught",
        "rank 1 raises in its update, inside a guard of the step, and nobody catches it",
        Raises("PeerFailed", ("rank 1", "injected"), on="others"),
        (at(1, "step", do.raise_after_update, rank=1),),
        ENDS,
    ),
    Case(
        "optimizers/guard_killed",
        "rank 1 is killed in its update, inside a guard of the step",
        Raises("PeerFailed", ("rank 1",), on="others"),
        (at(1, "step", do.at_update(send_signal(signal.SIGKILL)), rank=1),),
        ENDS,
        deaths=(1,),
    ),
    Case(
        "optimizers/guard_without_step",
        "rank 1 leaves its update out, inside a guard of the step",
        Raises("RanksDisagree", ("rank 1", "step", TO_DO)),
        (at(1, "step", no_update, rank=1),),
        ENDS,
        limit=20.0,
    ),
    Case(
        "optimizers/guard_all_raise",
        "all ranks raise in a hook before their update, inside a guard of the step",
        Equal(),
        (at(1, "step", do.raise_before_update),),
        STEP_GUARD,
    ),
    Case(
        "optimizers/guard_nothing",
        "nobody raises inside a guard of the step",
        PLAIN,
        setup=replace(STEP_GUARD, catches=0),
    ),
    Case(
        "optimizers/guard_scaler",
        "a scaler skips the update on all ranks, inside a guard of the step",
        PLAIN,
        (at(1, "gradients", do.infs_everywhere),),
        replace(STEP_GUARD, scaler=True, catches=0),
    ),
)

CASES: tuple[Case, ...] = (*HYPER, *STATE, *WRITES, *SETTINGS, *CLIPPING, *SCALING, *GUARDED)
