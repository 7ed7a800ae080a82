"""`fullshard plan`: what a rank holds, sends and waits for, before a launch; on the meta device, in one process."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullshard.cli.axes import add_axes, parallelism_of, refuse_beside_config

if TYPE_CHECKING:
    from fullshard.migrate.parallelism import Parallelism
    from fullshard.plan import Plan, Planner, Strategy
    from fullshard.plan.search import Degrees, Describe
    from fullshard.program import Program

# Plans of a search that are looked for and printed.
_SHOWN = 5

_EXAMPLES = """\
examples:
  fullshard plan llama-8b --ranks 8 --hardware h100-80g
  fullshard plan llama-70b --ranks 8 --hardware a100-80g --rough      the rule of thumb, and the truth beside it
  fullshard plan llama-70b --ranks 64 --hardware h100-80g --search    what fits, the fastest first
  fullshard plan train.toml --ranks 4 --hardware cpu                  a config of the trainer
  fullshard plan Llama-3.2-1B/config.json --ranks 8 --hardware mi300x-192g --batch 16 --micro 4
  fullshard plan my_model:program --ranks 16 --hardware my.toml --html plan.html
  fullshard plan train.toml --ranks 4 --hardware cpu --compare runs/one --calibrate mine.toml
  fullshard plan llama-70b --ranks 64 --tensor-parallel 8    the mesh, who holds what, the messages of each axis

SOURCE: a config of the trainer (.toml), module:function that returns a fullshard.Program, a Hugging Face config.json,
or a named shape. --explain answers one question: docs/plan.md has the list.

exit codes: 0 it fits, or a question was answered; 1 it does not fit; 2 cannot plan
"""


def add_command(commands: Any) -> None:
    """Add `plan` to the parser of the command line."""
    plan = commands.add_parser(
        "plan",
        help="predict memory, messages and time of a step",
        description="Predict what each rank holds, sends and waits for in a step, and what fits.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plan.add_argument("source", metavar="SOURCE", nargs="?", help="what is planned (below)")
    plan.add_argument("--ranks", type=int, default=8, metavar="N", help="devices, any number (default: 8)")
    plan.add_argument(
        "--hardware", default="h100-80g", metavar="NAME", help="a profile, a TOML file, or here: this CPU, measured"
    )
    plan.add_argument("--budget", type=float, metavar="GB", help="memory of a device (default: the hardware's)")
    plan.add_argument("--host-budget", type=float, metavar="GB", help="memory of the host for each rank")
    plan.add_argument("--replicas", type=int, metavar="N", help="copies of the state, HSDP (default: 1)")
    plan.add_argument(
        "--hosts", type=int, metavar="N", help="hosts of the ranks: what each sends to others (default: not counted)"
    )
    ways = plan.add_mutually_exclusive_group()
    ways.add_argument("--one-level", action="store_true", help="with --hosts: messages from rank to rank")
    ways.add_argument("--two-levels", action="store_true", help="or between hosts first (default: what is faster)")
    add_axes(plan, context=True, pipeline=True)
    plan.add_argument(
        "--reshard", metavar="always|never|N", help="reshard_after_forward of the units (default: always)"
    )
    plan.add_argument("--batch", type=int, metavar="N", help="samples of a rank in a step (default: one micro-batch)")
    plan.add_argument(
        "--micro", type=int, metavar="N", help="samples of one forward (default: the program's or the config's, or 1)"
    )
    plan.add_argument("--sequence", type=int, metavar="N", help="tokens of a sample")
    plan.add_argument(
        "--recompute", choices=("none", "selective", "alternate", "whole"), help="activations (default: none)"
    )
    plan.add_argument("--storage-dtype", metavar="DTYPE", help="of shards and optimizer state (default: the model's)")
    plan.add_argument("--compile", action="store_true", help="units are compiled: times with fused operations")
    plan.add_argument("--compile-loss", action="store_true", help="the loss is compiled: bytes of the loss, fused")
    plan.add_argument("--float8", action="store_true", help="linear layers in float8: their times")
    plan.add_argument("--param-dtype", metavar="DTYPE", help="of computation (default: bfloat16; on a CPU as stored)")
    plan.add_argument(
        "--keep-float32",
        metavar="CLASS,...",
        help="modules that compute in the dtype of their parameters, such as BatchNorm,LayerNorm (default: none)",
    )
    plan.add_argument("--reduce-dtype", metavar="DTYPE", help="of reductions (default: float32)")
    plan.add_argument("--offload", action="store_true", help="shards, gradients and state on the host")
    plan.add_argument("--offload-activations", action="store_true", help="what units keep for backward on the host")
    plan.add_argument(
        "--optimizer",
        help="adamw (default), adamw-foreach (of a config), adam, adamw8bit, muon, sgd, sgd-momentum or none",
    )
    plan.add_argument("--failures", type=float, metavar="HOURS", help="between two failures of one device")
    plan.add_argument("--search", action="store_true", help="try every combination of the dials, on every mesh")
    plan.add_argument(
        "--shown", type=int, metavar="N", help=f"plans that a search looks for and prints (default: {_SHOWN})"
    )
    plan.add_argument("--explain", metavar="QUESTION", help="answer one question")
    plan.add_argument(
        "--compare", type=Path, metavar="RUN", help="after a run of the trainer: its figures beside the plan's"
    )
    plan.add_argument(
        "--calibrate",
        type=Path,
        metavar="FILE",
        help="measure this machine and write FILE for --hardware; with --compare, what the run says about it",
    )
    plan.add_argument("--rough", action="store_true", help="the rule of thumb of the guide, and the plan beside it")
    plan.add_argument("--assumptions", action="store_true", help="print everything that is assumed")
    plan.add_argument("--json", action="store_true", help="one JSON object on stdout")
    plan.add_argument("--svg", type=Path, metavar="FILE", help="write a picture of the memory over a step")
    plan.add_argument("--html", type=Path, metavar="FILE", help="write one page with everything")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; its exit code."""
    from fullshard.program import ProgramError
    from fullshard.train.config import ConfigError

    try:
        return _run(arguments)
    except BrokenPipeError:
        raise
    except (ProgramError, ConfigError, ValueError, OSError) as error:
        print(f"fullshard plan: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _run(arguments: argparse.Namespace) -> int:
    from fullshard.cli.plan_run import calibrate, compare
    from fullshard.plan import Planner, find_hardware
    from fullshard.plan.facts import measured_cpu, physical_nbytes
    from fullshard.plan.page import page, svg
    from fullshard.plan.questions import QUESTIONS, explain, ranked
    from fullshard.plan.repeats import KEPT
    from fullshard.plan.result import FAILURE_HOURS, assumptions, table
    from fullshard.plan.stages import stage_lines, stage_rows
    from fullshard.program import ProgramError
    from fullshard.train.planned import described_by, table_of, without_old_objects

    for name in (
        "ranks",
        "replicas",
        "hosts",
        "tensor_parallel",
        "context_parallel",
        "expert_parallel",
        "pipeline_parallel",
        "stages_per_rank",
        "batch",
        "micro",
        "sequence",
        "shown",
        "budget",
        "host_budget",
        "failures",
    ):
        if (value := getattr(arguments, name)) is not None and not 0 < value < float("inf"):
            raise ValueError(f"--{name.replace('_', '-')} {value:g}: expected a number above 0")
    if arguments.explain is not None and arguments.explain not in QUESTIONS:
        raise ValueError(f"--explain {arguments.explain}: expected one of {', '.join(QUESTIONS)}")
    hardware = find_hardware("cpu" if arguments.hardware == "here" else arguments.hardware)
    if arguments.calibrate is not None and arguments.compare is None:
        return calibrate(hardware, arguments.calibrate, arguments.ranks)
    if arguments.source is None:
        raise ValueError("expected a SOURCE to plan, found none")
    if arguments.hardware == "here":
        hardware = replace(measured_cpu(hardware), memory=physical_nbytes() / arguments.ranks)
    asked = _source(arguments, hardware.backend)
    strategy, about = asked.strategy, asked.about
    keep = [name.strip() for name in (arguments.keep_float32 or "").split(",") if name.strip()]
    alike: dict[object, Any] = {}

    def describer(programs: Callable[[int | None], Program], plan: Parallelism, blocks: int = 0) -> Describe:
        made: dict[int | None, Program] = {}

        def described(samples: int, sequence: int | None, compute: str, alone: bool, recompute: Any) -> Any:
            if sequence not in made:
                made[sequence] = programs(sequence)
            sizes: dict[str, Any] = {"samples": samples, "compute": compute, "alone": alone, "keep_float32": keep}
            sizes |= {"on_cpu": hardware.blocking, "recompute": recompute, "alike": alike, "blocks": blocks}
            try:
                return described_by(plan, made[sequence], arguments.source, strategy.ranks, asked.output, **sizes)
            except ProgramError as error:
                if plan is asked.plan:
                    raise
                raise ValueError(str(error)) from error  # a search leaves these degrees out

        return described

    own = strategy.tensor, strategy.context, strategy.experts, strategy.pipeline

    def divide(degrees: Degrees, blocks: int = 0) -> Describe | str:
        found = (asked.programs, asked.plan) if degrees == own else asked.divided(degrees)
        return found if isinstance(found, str) else describer(*found, blocks)

    planner = Planner(
        describer(asked.programs, asked.plan),
        hardware,
        budget=None if arguments.budget is None else arguments.budget * 1e9,
        host_budget=None if arguments.host_budget is None else arguments.host_budget * 1e9,
        sequence=arguments.sequence,
        failure_hours=arguments.failures or FAILURE_HOURS,
        divide=divide,
        short=partial(divide, blocks=KEPT),
        degrees=own,
        table=table_of,
    )
    if arguments.compare is not None:
        return compare(planner.plan(strategy), arguments.compare, arguments.calibrate)
    if arguments.explain is not None:
        lines = explain(arguments.explain, planner, strategy)
        print(json.dumps({"question": arguments.explain, "answer": lines}) if arguments.json else "\n".join(lines))
        return 0
    plan = planner.plan(strategy)
    searched = arguments.search or not plan.fits
    with _progress() as say, without_old_objects():
        shown = arguments.shown or _SHOWN
        changes = planner.search(strategy, meshes=arguments.search, most=shown, say=say) if searched else []
        least = None if plan.fits else planner.least_ranks(strategy)
    for option, path, text in (("--svg", arguments.svg, svg), ("--html", arguments.html, page)):
        if path is not None:
            try:
                path.write_text(text(plan), encoding="utf-8")
            except OSError as error:
                raise ValueError(f"{option} {path}: cannot write it: {error.strerror or error}") from None
    if arguments.json:
        found = plan.as_json()
        found |= {"axes": about, "pipeline": stage_rows(plan)}
        found["changes"] = [
            {
                "says": change.says,
                "peak_bytes": int(change.plan.peak_nbytes),
                "step_seconds": change.plan.seconds,
                "tokens_per_second": change.plan.tokens_per_second,
            }
            for change in changes
        ]
        found["left_out"] = [left._asdict() for left in planner.left_out.rows()]
        found["least_ranks"] = None if least is None else least.strategy.ranks
        print(json.dumps(found))
        return 0 if plan.fits else 1
    if arguments.rough:
        print("\n".join(_rough(planner, strategy)) + "\n")
    if about:
        print("\n".join(about) + "\n")
    print("\n".join([table(plan), *stage_lines(plan)]))
    if changes:
        print("\n" + ("what fits, the fastest first" if arguments.search else "the cheapest changes that fit"))
        print("\n".join(ranked(changes)))
    elif searched:
        print("\nnothing that was tried fits: use more ranks, a smaller model or shorter sequences")
    if left := planner.left_out.lines():
        print("\n" + "\n".join(["left out of the search", *left]))
    if not plan.fits:
        print(f"\n{_fewest(least)}")
    if arguments.assumptions:
        print("\nassumed\n" + "\n".join(f"  {text}" for text in assumptions(plan)))
    return 0 if plan.fits else 1


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A line on a terminal, which is gone at the end; elsewhere nothing is printed."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return

    def say(text: str) -> None:
        print(f"\r\x1b[K{text}"[: shutil.get_terminal_size().columns + 3], end="", file=sys.stderr, flush=True)

    try:
        yield say
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _fewest(plan: Plan | None) -> str:
    """Says on how many devices the strategy that was asked for fits."""
    from fullshard.plan.result import gigabytes

    if plan is None:
        return "as asked for it fits on no number of devices"
    return (
        f"as asked for it fits on {plan.strategy.ranks} devices and on no fewer: peak {gigabytes(plan.peak_nbytes)}, "
        f"{gigabytes(plan.spare_nbytes)} to spare"
    )


def _rough(planner: Planner, strategy: Strategy) -> list[str]:
    """The guide's example by its rule, then this model by the same rule."""
    from fullshard.plan import rough

    model = planner.model(strategy.micro, strategy.computed)
    samples, length = strategy.micro * strategy.accumulate, model.tokens // model.samples
    found = rough.rough_of(model.numel, strategy.ranks, samples, length)
    lines = [
        "rough: the rule of thumb of the guide (seed 002), its example of 70B on 8 x A100-80GB",
        *rough.lines(rough.EXAMPLE, rough.EXAMPLE_BATCH, rough.EXAMPLE_LENGTH, 80e9),
        *rough.remedy(rough.EXAMPLE, rough.EXAMPLE_BATCH, 80e9),
        f"rough: the same rule for {model.name}, {samples} samples of {length} tokens on {strategy.ranks} devices",
        *rough.lines(found, samples, length, planner.budget),
    ]
    return [*lines, _enough(planner, strategy), "the ledger, for what was asked:"]


def _enough(planner: Planner, strategy: Strategy) -> str:
    """Finds from how many ranks on it fits by the ledger, with whole recomputation and one sample at a time."""
    samples = strategy.micro * strategy.accumulate
    changed = replace(strategy, recompute="whole", micro=1, accumulate=samples, send_each=True, reshard=True)
    plan = planner.least_ranks(changed)
    if plan is None:
        return "the ledger: it fits on no number of devices"
    return (
        f"the ledger: {samples} samples, one at a time, recomputed: fits on {plan.strategy.ranks} devices and on no "
        f"fewer, {plan.peak_nbytes / 1e9:.1f} GB"
    )


@dataclass(frozen=True)
class _Asked:
    """The programs of SOURCE by length of sequence, the strategy that was asked for, and what its axes mean. `whole`:
    the programs before they are divided, None where SOURCE divides its model itself; `plan`: the declaration."""

    programs: Callable[[int | None], Program]
    strategy: Strategy
    about: list[str]
    whole: Callable[[int | None], Program] | None
    plan: Parallelism
    length: int | None
    has_own_length: bool = False
    # The dtype of what stages of a pipeline give, None for the one that it has.
    output: str | None = None

    @cached_property
    def _model(self) -> Any:
        """The model before it is divided, on the meta device."""
        import torch

        assert self.whole is not None
        with torch.device("meta"):
            return self.whole(self.length).model()

    def divided(self, degrees: Degrees) -> tuple[Callable[[int | None], Program], Parallelism] | str:
        """The programs with other degrees, without replicas, or why the model or the ranks do not allow these."""
        from fullshard.migrate.declared import broken_rules

        tensor, context, experts, pipeline = degrees
        if self.whole is None:
            return "the program divides its model itself (`parallelize`), and says no other way"
        if self.has_own_length and context > 1:
            return "batches of the program have a length of their own"
        cuts = tensor > 1
        if pipeline > 1 and (pipeline == self.plan.pipeline_parallel_degree or self.plan.pipeline_parallel_degree > 1):
            pipelines: dict[str, Any] = {"pipeline_parallel_degree": pipeline, "module_fqns_per_model_part": ()}
        else:
            pipelines = {"pipeline_parallel_degree": pipeline} | _NO_PIPELINE
        plan = replace(
            self.plan,
            **pipelines,
            tensor_parallel_degree=tensor,
            context_parallel_degree=context,
            context_parallel_variant=self.plan.context_parallel_variant if context > 1 else "auto",
            expert_parallel_degree=experts,
            expert_tensor_parallel_degree=1,
            data_parallel_replicate_degree=1,
            data_parallel_shard_degree=-1,
            enable_sequence_parallel=self.plan.enable_sequence_parallel if cuts else "auto",
            enable_loss_parallel=self.plan.enable_loss_parallel and cuts,
            styles=self.plan.styles if cuts or experts > 1 else (),
        )
        program = self.whole(self.length)
        if pipeline > 1 and program.loss_fn is None:
            return "expected Program(loss_fn=...), which the last stage of a pipeline calls, found none"
        broken, _ = broken_rules(self._model, plan, self.strategy.ranks, sequence=_length_of(program))
        if broken:
            return broken[0]
        return _divided(self.whole, plan, self.strategy.ranks, self.length)[0], plan


# What a declaration without a pipeline does not say.
_NO_PIPELINE = {
    "pipeline_parallel_schedule": "1F1B",
    "pipeline_parallel_stages_per_rank": 0,
    "pipeline_parallel_num_microbatches": 0,
    "pipeline_parallel_microbatch_size": 0,
    "module_fqns_per_model_part": (),
}


def _length_of(program: Program) -> int:
    """The tokens of a sequence; 0 if a batch does not say."""
    from fullshard.plan.tape import tensors_in

    first = next(tensors_in([program.batch(0)]), None)
    return int(first.shape[1]) if first is not None and first.ndim == 2 else 0


def _source(arguments: argparse.Namespace, backend: str) -> _Asked:
    from fullshard.plan import Strategy
    from fullshard.plan.facts import samples_of
    from fullshard.program import ProgramError, find_program
    from fullshard.train import shapes
    from fullshard.train.config import load_config
    from fullshard.train.planned import programs_of, strategy_of

    source = arguments.source
    programs: Callable[[int | None], Program]
    path = Path(source)
    if source.endswith(".toml"):
        refuse_beside_config(arguments, source)
        config = load_config(path)
        if arguments.replicas is not None:
            config = config.with_replicas(arguments.replicas)
        config.check_world(arguments.ranks)
        programs, strategy = programs_of(config, arguments.ranks), strategy_of(config, arguments.ranks, backend)
        about = _about(programs(None), config.sharding.parallel, arguments.ranks, config.training.sequence_length)
        parts, length = config.axes(arguments.ranks).cp, config.training.sequence_length

        def whole(sequence: int | None) -> Program:
            return replace(programs((sequence or length) * parts), parallelize=None)

        output = config.sharding.precision.dtypes[2]
        strategy = _with_dials(strategy, arguments, strategy.micro * strategy.accumulate)
        return _Asked(programs, strategy, about, whole, config.sharding.parallel, length, output=output)
    if source in shapes.NAMED:
        programs = lambda sequence: shapes.named(source, sequence)  # noqa: E731
    elif source.endswith(".json") or (path / "config.json").is_file():
        file = path / "config.json" if path.is_dir() else path
        programs = lambda sequence: shapes.hugging_face(file, sequence)  # noqa: E731
    elif ":" in source:
        for name in ("sequence", "context_parallel"):
            if getattr(arguments, name) is not None:
                raise ValueError(
                    f"--{name.replace('_', '-')}: the batches of {source} have a length of their own; leave it out"
                )
        found = find_program(source)
        programs = lambda sequence: found  # noqa: E731
    else:
        raise ProgramError(
            f"{source}: expected a .toml, a config.json, module:function, or one of {', '.join(shapes.NAMED)}"
        )
    plan = parallelism_of(arguments)
    own = ":" in source and found.parallelize is not None
    undivided = None if own else programs
    programs, length = _divided(programs, plan, arguments.ranks, arguments.sequence)
    length = 0 if ":" in source else length  # its model may get a part of the batch
    about = _about(programs(length or None), plan, arguments.ranks, length, own=own)
    strategy = Strategy(
        ranks=arguments.ranks,
        backend=backend,
        tensor=plan.tensor_parallel_degree,
        context=plan.context_parallel_degree,
        experts=plan.expert_parallel_degree,
        pipeline=plan.pipeline_parallel_degree,
        schedule=plan.pipeline_parallel_schedule,
        stages=plan.num_stages // plan.pipeline_parallel_degree,
        # A pipeline would gather its layers for each micro-batch.
        reshard=plan.pipeline_parallel_degree == 1,
        root_reshard=False if plan.pipeline_parallel_degree > 1 else None,
        replicas=plan.data_parallel_replicate_degree,
        micro=samples_of(found.batch(0)) if ":" in source else 1,
    )
    if backend != "gloo":
        strategy = replace(strategy, compute="bfloat16", reduce="float32")
    has_own_length = ":" in source
    strategy = _with_dials(strategy, arguments)
    return _Asked(programs, strategy, about, undivided, plan, arguments.sequence, has_own_length)


def _divided(
    programs: Callable[[int | None], Program], plan: Parallelism, ranks: int, sequence: int | None
) -> tuple[Callable[[int | None], Program], int]:
    """The programs of one rank along `tp`, `cp` and `ep`; and the tokens of a whole sequence, 0 if a batch does not
    say."""
    from fullshard.migrate.declared import noted_by
    from fullshard.plan.tape import note

    if not plan.beyond_data:
        return programs, sequence or 0
    shared = ranks // plan.data_parallel_replicate_degree // plan.pipeline_parallel_degree
    whole = _length_of(programs(sequence))

    def made(length: int | None) -> Program:
        length = length or (whole if plan.context_parallel_degree > 1 else None)
        program = programs(length and length // plan.context_parallel_degree)
        return program if program.parallelize else replace(program, parallelize=noted_by(plan, shared, note))

    return made, whole


def _about(program: Program, plan: Parallelism, ranks: int, sequence: int, *, own: bool = False) -> list[str]:
    """Lines about the axes, for the model. `own`: the program divides it itself. Raises `ConfigError` with the nearest
    legal plan."""
    import torch

    from fullshard.migrate.declared import declare
    from fullshard.program import ProgramError

    if not plan.beyond_data:
        return []
    if own:
        return [*plan.on(ranks).lines(), "layers: as `parallelize` of the program divides them"]
    try:
        with torch.device("meta"):
            model = program.model()
    except Exception as error:
        raise ProgramError(f"the model cannot be built on the meta device: {type(error).__name__}: {error}") from error
    declared = declare(model, plan, ranks, sequence=sequence)
    return [*declared.lines(), *declared.stages(model)]


def _with_dials(strategy: Strategy, arguments: argparse.Namespace, samples: int = 0) -> Strategy:
    """`strategy` with what the command line says. `samples`: those of its step, if SOURCE says how many; another
    micro-batch does not change them."""
    from fullshard.plan.hosts import ONE_LEVEL, TWO_LEVELS
    from fullshard.plan.recomputation import on_host

    changes: dict[str, Any] = {}
    if arguments.replicas is not None:
        changes["replicas"] = arguments.replicas
    if arguments.hosts is not None:
        ways = ONE_LEVEL if arguments.one_level else TWO_LEVELS if arguments.two_levels else None
        changes |= {"hosts": arguments.hosts, "ways": ways}
    elif arguments.one_level or arguments.two_levels:
        option = "--one-level" if arguments.one_level else "--two-levels"
        raise ValueError(f"{option}: expected --hosts beside it; add it, or leave this out")
    if arguments.reshard is not None:
        changes["reshard"] = _reshard(arguments.reshard)
    micro = strategy.micro if arguments.micro is None else arguments.micro
    batch = arguments.batch or samples or micro
    if batch % micro:
        if arguments.batch is None:
            problem = f"expected a divisor of the {batch} samples that a rank has in a step; or give --batch, too"
            raise ValueError(f"--micro {micro}: {problem}")
        raise ValueError(f"--batch {batch}: expected a multiple of the micro-batch, {micro}")
    changes |= {"micro": micro, "accumulate": batch // micro}
    for name, value in (("recompute", arguments.recompute), ("optimizer", arguments.optimizer)):
        if value is not None:
            changes[name] = value
    if arguments.recompute is not None and strategy.hosts_activations:
        changes["recompute"] = on_host(arguments.recompute)
    for name, value in (
        ("compute", arguments.param_dtype),
        ("reduce", arguments.reduce_dtype),
        ("storage", arguments.storage_dtype),
    ):
        if value is not None:
            changes[name] = _dtype(value)
    strategy = replace(strategy, offload=arguments.offload or strategy.offload, **changes)
    strategy = replace(strategy, compiled=arguments.compile, compiled_loss=arguments.compile_loss)
    strategy = replace(strategy, float8=arguments.float8)
    if arguments.offload_activations:
        strategy = strategy.with_activations(hosted=True)
    return strategy


def _reshard(text: str) -> bool | int:
    words = {"always": True, "never": False}
    if text in words:
        return words[text]
    if not text.isdigit():
        raise ValueError(f"--reshard {text}: expected always, never or a number of ranks")
    return int(text)


def _dtype(text: str) -> str:
    name = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "default": ""}.get(text, text)
    if name not in ("", "bfloat16", "float16", "float32", "float64"):
        raise ValueError(f"{text}: expected a dtype of bfloat16, float16, float32, float64, or default")
    return name
