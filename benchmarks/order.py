"""What it costs to compare messages before they are sent: FULLSHARD_ORDER=check against trust, side by side.

python -m benchmarks.order                     2 ranks, the light workload of cpu_step; a minute on two cores
python -m benchmarks.order --worlds 2 4        more ranks for a question

step        seconds of a step with AdamW either way, one after the other in each round; the median of the ratios
compare     what the comparison of one message takes, measured by itself: the messages of a step, one after the other
share       compare times the messages of a step, by the CPU time of a step, the least of each: what the ratio is
            too noisy to show
calls       Python functions that a step calls, check and trust, counted: no machine is too busy for that. They do not
            grow with the ranks, nor does anything else of a step: what is compared is on this rank
question    what a question takes, all ranks asking at once
first step  how many questions that asks, of how many messages
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import torch.distributed as dist

from benchmarks.common import LIGHT, TINY, ModelShape, Trainee, batch_of, build_fullshard, on_ranks, paired_ratio
from benchmarks.common import print_json as print_answer
from benchmarks.host import count_calls
from fullshard.comm import Domain, domain_of
from fullshard.lifecycle import Action, Order

WARMUP_ROUNDS = 3
QUESTIONS = 200


def measure(rank: int, world: int, shape: ModelShape, rounds: int) -> dict[str, Any]:
    """The figures of one rank."""
    asked: list[str] = []
    agree = Domain.agree

    def counted(domain: Domain, what: str, value: str) -> dict[int, str] | None:
        asked.append(what)
        return agree(domain, what, value)

    tokens, targets = batch_of(shape, LIGHT, rank)
    trainees = []
    Domain.agree = counted  # type: ignore[method-assign]
    for setting in ("check", "trust"):
        os.environ["FULLSHARD_ORDER"] = setting
        trainee = Trainee(setting, build_fullshard(shape), adamw=True)
        trainee.step(tokens, targets)  # its root forms with this setting
        trainees.append(trainee)
    first = asked.count("order")
    actions = _actions_of(trainees[0], tokens, targets)
    times: dict[str, list[float]] = {trainee.name: [] for trainee in trainees}
    cpu: dict[str, list[float]] = {trainee.name: [] for trainee in trainees}
    for current in range(WARMUP_ROUNDS + rounds):
        if current == WARMUP_ROUNDS:
            asked.clear()
        # In turns, so that neither always follows the other.
        for trainee in trainees if current % 2 else reversed(trainees):
            dist.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            trainee.step(tokens, targets)
            if current >= WARMUP_ROUNDS:
                times[trainee.name].append(time.perf_counter() - start)
                cpu[trainee.name].append(time.process_time() - cpu_start)
    later = asked.count("order")
    # Behind them: the first forwards of a model are watched.
    calls = {}
    for trainee in trainees:
        dist.barrier()
        calls[trainee.name] = count_calls(lambda trainee=trainee: trainee.step(tokens, targets))  # type: ignore[misc]
    return {
        "ratio": paired_ratio(times["check"], times["trust"]),
        "step_ms": statistics.median(times["trust"]) * 1e3,
        "cpu_ms": min(cpu["trust"]) * 1e3,
        "calls_check": calls["check"],
        "calls_trust": calls["trust"],
        "messages": len(actions),
        "questions_of_the_first_step": first,
        "questions_of_later_steps": later,
        "compare_us": _compare_seconds(trainees[0]) / len(actions) * 1e6,
        "follow_us": _follow_seconds(actions) / len(actions) * 1e6,
        "question_ms": _question_seconds(world) * 1e3,
    }


def _actions_of(trainee: Trainee, tokens: Any, targets: Any) -> list[Action]:
    """What one step sends."""
    found: list[Action] = []
    follows = Order.follows

    def noted(order: Order, action: Action) -> bool:
        found.append(action)
        return follows(order, action)

    Order.follows = noted  # type: ignore[method-assign]
    try:
        trainee.step(tokens, targets)
    finally:
        Order.follows = follows  # type: ignore[method-assign]
    return found


def _compare_seconds(trainee: Trainee) -> float:
    """Of the comparisons of one step, from unit to answer, on an order that knows them. Nothing is sent."""
    from fullshard.runtime import unit_of

    unit = unit_of(trainee.model)
    assert unit is not None and unit.root is not None and unit.root.order is not None
    order, units = unit.root.order, unit.root.units

    def step() -> None:
        order.forward_begins(grad=True)
        order.stepped()
        for each in units:
            order.gather(each)
        for each in reversed(units[1:]):
            order.gather(each)
            order.reduce(each, accumulated=False, partials=False, keep=False)
        order.reduce(units[0], accumulated=False, partials=False, keep=False)

    # The ranks go through the same calls, so that what is asked at first is answered.
    for _ in range(4):
        step()
    return min(_seconds(step) for _ in range(50))


def _follow_seconds(actions: list[Action]) -> float:
    """Of the decisions alone."""
    order = Order()

    def step() -> None:
        for action in actions:
            if not order.follows(action):
                order.enter(action)

    step()
    return min(_seconds(step) for _ in range(50))


def _question_seconds(world: int) -> float:
    domain = domain_of(range(world))
    assert domain is not None
    taken = []
    for number in range(QUESTIONS):
        dist.barrier()
        taken.append(_seconds(lambda number=number: domain.agree("benchmark", str(number))))
    return statistics.median(taken)


def _seconds(call: Any) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def report(world: int, row: dict[str, Any]) -> dict[str, Any]:
    """Print one world's figures, and return them."""
    share = row["compare_us"] * row["messages"] / (row["cpu_ms"] * 1e3)
    more = row["calls_check"] - row["calls_trust"]
    print(f"\n{world} ranks, {LIGHT.sequences}x{LIGHT.length} tokens per rank")
    print(f"  step, trust           {row['step_ms']:8.1f} ms")
    print(f"  step, check / trust   {row['ratio']:8.4f}")
    print(f"  compare one message   {row['compare_us']:8.2f} us, of these {row['follow_us']:.2f} for the decision")
    print(
        f"  share of a step       {100 * share:8.3f} % ({row['messages']} messages, {row['cpu_ms']:.0f} ms of CPU time)"
    )
    print(
        f"  calls of a step       {more:8d} more than {row['calls_trust']}, {more / row['messages']:.1f} for a message"
    )
    print(f"  a question            {row['question_ms']:8.2f} ms")
    print(f"  questions             {row['questions_of_the_first_step']} in the first step, ", end="")
    print(f"{row['questions_of_later_steps']} in all others that were measured", flush=True)
    return {"world": world, **{name: round(value, 5) for name, value in row.items()}, "share": round(share, 6)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2], help="numbers of ranks (default: 2)")
    parser.add_argument("--rounds", type=int, default=40, help="measured rounds (default: 40)")
    parser.add_argument("--tiny", action="store_true", help="a model of a few thousand parameters, to try the script")
    options = parser.parse_args()
    shape = TINY if options.tiny else ModelShape()
    results = [report(world, on_ranks(world, measure, shape, options.rounds)[0]) for world in options.worlds]
    print()
    print_answer("order", shape, results)


if __name__ == "__main__":
    main()
