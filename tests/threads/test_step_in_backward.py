"""`step_in_backward`: bit by bit the training that steps behind backward, without all gradients at once; what cannot be
combined with it is an error; a backward that fails says what it stepped.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard.param import ParamGroup, SteppedGrad
from fullshard.policy import use_options
from tests.harness.behaviours import behaviour
from tests.harness.errors import RanksFailed
from tests.harness.models import BY_NAME, CASES, Case, assert_same_training, collect, seeded
from tests.harness.threads import run_ranks
from tests.threads.programs import PROGRAMS, batch, part, shard
from tests.threads.test_offload import late, links, moved  # noqa: F401
from tests.threads.uses import USES, Use, of_program

ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


def optimizer_of(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Two groups: one of them decays nothing."""
    parameters = list(model.parameters())
    groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, **{**ADAMW, **options})


def train(
    rank: int,
    case: Case,
    model: Any,
    *,
    in_backward: bool,
    steps: int = 3,
    micro: int = 1,
    waits: Callable[[Any, bool], None] | None = None,
    **options: Any,
) -> Any:
    """`waits(model, last)` says before each of `micro` backwards of a step whether it is the last."""
    optimizer = optimizer_of(model, **options)
    if in_backward:
        fullshard.step_in_backward(model, optimizer)
    losses = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
        for number in range(micro):
            if waits is not None:
                waits(model, number == micro - 1)
            loss = case.loss(model, case.batch(step * micro + number, rank))
            loss.backward()
            losses.append(loss.item())
        if in_backward:
            held = [p.grad for p in model.parameters() if p.grad is not None]
            assert held and all(isinstance(gradient, SteppedGrad) for gradient in held)
        optimizer.step()
        optimizer.zero_grad()
    return collect(model, optimizer, losses)


def same_with_and_without(
    rank: int, case: Case, make: Callable[[], Any], shard: Callable[[Any], Any], **options: Any
) -> None:
    results = [train(rank, case, shard(make()), in_backward=way, **options) for way in (False, True)]
    assert_same_training(results[1], results[0], 0)


def _shard(case: Case, **options: Any) -> Callable[[Any], Any]:
    return lambda model: case.shard(model, fullshard.fully_shard, **options)


MIXED = fullshard.MixedPrecisionPolicy(torch.bfloat16, torch.float32)


@pytest.mark.sample(1)
@behaviour(
    "`fullshard.step_in_backward`: bitwise the training that steps after backward",
    area="training",
    torch="none",
    reason="torch has no such function",
)
@pytest.mark.parametrize("world", [1, 2, *(pytest.param(w, marks=pytest.mark.slow) for w in (3, 4))])
def test_the_same_parameters_and_states(world: int) -> None:
    """Uneven dims, dims below the world, frozen and tied parameters, nested units; float32 and mixed precision; each of
    torch's ways to step."""

    def rank_main(rank: int) -> None:
        for number, case in enumerate(CASES):
            policy = MIXED if number % 2 else fullshard.MixedPrecisionPolicy()
            way: dict[str, Any] = ({}, {"foreach": True}, {"fused": True})[number % 3]
            same_with_and_without(rank, case, case.build, _shard(case, mp_policy=policy), steps=2, **way)

    run_ranks(world, rank_main)


RUNS: dict[str, Use] = {name: of_program(program) for name, program in PROGRAMS.items()} | {
    name: use
    for name, use in USES.items()
    if name not in ("func_jvp", "forward_ad")  # forward mode has one level for all threads
}
# Two backwards that both step.
SEVERAL = {
    "forwards_and_backwards_crossed",
    "backward_inside_a_block",
    "accumulate_unused_reduced",
    "through_time",
    "chunked_backward",
}
OFTEN = {"shared_blocks", "gradient_penalty", "recompute_outside_reentrant", "unused_layer", "same_loss_twice", "pairs"}


@pytest.mark.sample(3)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN | {"through_time"} else pytest.mark.slow) for name in RUNS]
)
def test_programs_train_as_with_steps_behind_backward(name: str, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Views, double backward, recomputation, weights read late, units used twice: nothing reads weights of after their
    step, and no gradient comes behind it. Programs with two backwards that step are refused."""
    monkeypatch.setenv("FULLSHARD_CHECK", "1")
    use = RUNS[name]
    base = seeded(use.model)

    def train_program(rank: int, in_backward: bool) -> list[Tensor]:
        model = use.shard(copy.deepcopy(base))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if in_backward:
            fullshard.step_in_backward(model, optimizer)
        for step in range(2):
            use.run(model, part(batch(world, step), rank), step, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return [p.full_tensor().detach() for p in model.parameters()]

    behind = run_ranks(world, train_program, False)
    if name in SEVERAL:
        with pytest.raises(
            RanksFailed, match=r"expected optimizer\.step\(\) between two backwards|modified by an inplace operation"
        ):
            run_ranks(world, train_program, True)
        return
    inside = run_ranks(world, train_program, True)
    assert all(torch.equal(x, y) for x, y in zip(behind[0], inside[0], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("mixed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_on_meshes_that_replicate_and_with_checkpointed_accumulation(mixed: bool) -> None:
    """Backwards that hold gradients, keep partial sums, are said not to be the last, or keep their graph: none of them
    steps, and what they brought is in the step of the last one."""
    case = BY_NAME["transformer"]
    waits: list[Callable[[Any, bool], None]] = [
        lambda model, last: model.set_requires_gradient_sync(last),
        lambda model, last: model.set_requires_all_reduce(last),
        lambda model, last: model.set_is_last_backward(last),
    ]

    def rank_main(rank: int) -> None:
        policy = MIXED if mixed else fullshard.MixedPrecisionPolicy()
        for shape in ((2, 2), (4, 1), (1, 4)):
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
            for wait in waits if shape == (2, 2) else (None,):
                same_with_and_without(
                    rank,
                    case,
                    case.build,
                    _shard(case, mesh=mesh, mp_policy=policy),
                    steps=2,
                    micro=1 if wait is None else 2,
                    waits=wait,
                )

    run_ranks(4, rank_main)


def test_what_is_left_is_stepped_by_optimizer_step() -> None:
    """Gradients of backwards that do not step, and of parameters without a unit."""

    def rank_main(rank: int) -> None:
        results = []
        for in_backward in (False, True):
            case = BY_NAME["uneven_mlp"]
            model: Any = case.shard(case.build(), fullshard.fully_shard)
            plain = nn.Parameter(torch.ones(5))
            optimizer = torch.optim.AdamW([*model.parameters(), plain], lr=0.1)
            if in_backward:
                fullshard.step_in_backward(model, optimizer)
            for step in range(3):
                model.set_is_last_backward(step != 1)
                inputs, targets = case.batch(step, rank)
                ((model(inputs) * plain - targets) ** 2).mean().backward()
                stepped = [isinstance(p.grad, SteppedGrad) for p in model.parameters()]
                assert all(stepped) if in_backward and step != 1 else not any(stepped)
                # No unit has it, so its gradient is the caller's to reduce.
                dist.all_reduce(plain.grad)
                optimizer.step()
                optimizer.zero_grad()
            model.set_is_last_backward(True)
            assert not torch.equal(plain, torch.ones(5))
            trained = [plain, optimizer.state[plain]["exp_avg"], *(p.to_local() for p in model.parameters())]
            results.append([tensor.detach().clone() for tensor in trained])
        assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))

    run_ranks(2, rank_main)


@pytest.mark.usefixtures("moved")
def test_with_gradients_that_go_to_the_host() -> None:
    """Downloads that arrive when they are waited for, and not before."""
    case = BY_NAME["transformer"]

    def shard_offloaded(model: Any) -> Any:
        case.shard(model, fullshard.fully_shard, offload_policy=fullshard.CPUOffloadPolicy(), mp_policy=MIXED)
        for link in links(model):
            late(link)
        assert len(links(model)) == 4
        return model

    run_ranks(2, lambda rank: same_with_and_without(rank, case, case.build, shard_offloaded))


@behaviour(
    "`fullshard.step_in_backward`: reduced gradients of one unit exist at a time, not those of the model",
    area="training",
    torch="none",
    reason="torch has no such function",
)
@pytest.mark.parametrize("in_flight", [1, 2])
def test_gradients_are_freed_unit_by_unit(in_flight: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted at each arrival of a unit's reduced gradients: bytes of all of them that are alive."""
    alive: dict[int, list[weakref.ref[Tensor]]] = {}
    most: dict[int, int] = {}
    original = ParamGroup.receive

    def receive(self: ParamGroup, trainable: Sequence[int], parts: Sequence[Tensor | None], *, partial: bool) -> None:
        original(self, trainable, parts, partial=partial)
        rank = self.params[0].spec.mesh.get_rank()
        mine = alive.setdefault(rank, [])
        mine += [weakref.ref(part) for part in parts if part is not None]
        nbytes = sum(tensor.nbytes for ref in mine if (tensor := ref()) is not None)
        most[rank] = max(most.get(rank, 0), nbytes)

    monkeypatch.setattr(ParamGroup, "receive", receive)
    depth, width = 6, 8

    def rank_main(rank: int, in_backward: bool) -> int:
        alive.pop(rank, None)
        most.pop(rank, None)
        model = seeded(lambda: nn.Sequential(*(nn.Linear(width, width) for _ in range(depth))))
        for child in model:
            fullshard.fully_shard(child)
        fullshard.fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        if in_backward:
            fullshard.step_in_backward(model, optimizer)
        for _ in range(2):
            model(torch.ones(2, width)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return most[rank]

    unit_nbytes = 4 * (width * width + width) // 2
    with use_options(reductions_in_flight=in_flight):
        assert set(run_ranks(2, rank_main, False)) == {depth * unit_nbytes}
        assert set(run_ranks(2, rank_main, True)) == {unit_nbytes}


@pytest.mark.slow
def test_state_dicts_are_canonical_and_load() -> None:
    """Those of training that steps behind backward, and either goes on from the other's."""
    case = BY_NAME["tied"]

    def rank_main(rank: int) -> None:
        def go_on(in_backward: bool, state: Any, steps: range) -> tuple[Any, Any]:
            model: Any = case.shard(case.build(), fullshard.fully_shard)
            optimizer = optimizer_of(model)
            if in_backward:
                fullshard.step_in_backward(model, optimizer)
            if state is not None:
                # Of an optimizer that did not step yet, torch makes the state by a step with gradients of zeros.
                set_optimizer_state_dict(model, optimizer, optim_state_dict=copy.deepcopy(state))
            for step in steps:
                case.loss(model, case.batch(step, rank)).backward()
                optimizer.step()
                optimizer.zero_grad()
            return get_optimizer_state_dict(model, optimizer), collect(model, optimizer)

        states = [go_on(in_backward, None, range(1))[0] for in_backward in (False, True)]
        plain, inside = states
        assert plain["param_groups"] == inside["param_groups"] and plain["state"].keys() == inside["state"].keys()
        assert "embedding.weight" in plain["state"] and "layers.0.attention.qkv.weight" in plain["state"]
        for name, entries in plain["state"].items():
            for key, value in entries.items():
                other = inside["state"][name][key]
                assert type(other) is type(value)
                if isinstance(value, DTensor):
                    assert other.placements == value.placements
                    other, value = other.to_local(), value.to_local()
                assert torch.equal(other, value)
        ends = [go_on(not in_backward, state, range(1, 3))[1] for in_backward, state in enumerate(states)]
        assert_same_training(ends[1], ends[0], 0)

    run_ranks(2, rank_main)


def test_what_reads_gradients_afterwards_is_told() -> None:
    case = BY_NAME["residual"]

    def rank_main(rank: int) -> None:
        model: Any = case.shard(case.build(), fullshard.fully_shard)
        optimizer = torch.optim.AdamW(model.parameters())
        fullshard.step_in_backward(model, optimizer)
        refused = "took a step with it in backward already"

        def backward() -> None:
            case.loss(model, case.batch(0, rank)).backward()

        backward()
        for clip in (fullshard.clip_grad_norm_, nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_):
            with pytest.raises(RuntimeError, match=refused):
                clip(model.parameters(), 1.0)
        with pytest.raises(RuntimeError, match=refused):
            next(model.parameters()).grad.norm()
        for kind in (torch.amp.GradScaler, fullshard.GradScaler):
            scaler = kind("cpu")
            scaler.scale(torch.ones(()))
            with pytest.raises(RuntimeError, match=refused):
                scaler.unscale_(optimizer)
            with pytest.raises(RuntimeError, match=refused):
                scaler.step(optimizer)
        other = torch.optim.SGD(model.parameters(), lr=1.0)
        with pytest.raises(RuntimeError, match=refused):
            other.step()
        with pytest.raises(RuntimeError, match=r"optimizer\.step\(\) between two backwards"):
            optimizer.zero_grad()  # which is no end of a step
            backward()
        optimizer.step()
        backward()

    run_ranks(2, rank_main)


class Outside(nn.Module):
    """Three units; a weight of the last is read before the first, `read(x, weight)`."""

    def __init__(self, read: Callable[[Tensor, Tensor], Tensor], *, segment: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.read, self.segment = read, segment

    def forward(self, x: Tensor) -> Tensor:
        last: Any = self.layers[2]
        last.unshard()
        x = self.read(self.first(x), last.weight)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True) if self.segment and layer is last else layer(x)
        return x


def test_gradients_and_uses_behind_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that comes late is waited for; one that comes once more, and weights read again, are errors."""
    monkeypatch.setenv("FULLSHARD_WATCH", "always")

    def train_outside(make: Callable[[], nn.Module], in_backward: bool) -> list[Tensor]:
        model: Any = shard(seeded(make))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if in_backward:
            fullshard.step_in_backward(model, optimizer)
        for step in range(2):
            model(torch.full((2, 5), 1.0 + step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.full_tensor().detach() for p in model.parameters()]

    def late() -> nn.Module:
        return Outside(lambda x, weight: x * weight.mean())

    def again() -> nn.Module:
        return Outside(lambda x, weight: x * weight.mean(), segment=True)

    def read() -> nn.Module:
        # A view without a graph: the weight's own gradient does not wait for this use.
        return Outside(lambda x, weight: x @ torch.no_grad()(weight.t)())

    def rank_main(rank: int) -> None:
        for make in (late, again, read):
            behind = train_outside(make, False)
            if make is late:
                assert all(torch.equal(x, y) for x, y in zip(behind, train_outside(make, True), strict=True))
        with pytest.raises(RuntimeError, match=r"layers\.2: .*found more for weight after it"):
            train_outside(again, True)

    for world in (1, 2):
        run_ranks(world, rank_main)
        with pytest.raises(RanksFailed, match="no use of its weights in a backward after"):
            run_ranks(world, lambda rank: train_outside(read, True))


def test_shards_that_are_being_sent_are_not_changed() -> None:
    """A prefetch list that names a module whose backward is over: its step waits for the end."""

    def rank_main(rank: int) -> None:
        case = BY_NAME["residual"]
        results = []
        for in_backward in (False, True):
            model: Any = case.shard(case.build(), fullshard.fully_shard)
            model[0].set_modules_to_backward_prefetch([model[2]])
            optimizer = optimizer_of(model)
            stepping = fullshard.step_in_backward(model, optimizer) if in_backward else None
            for step in range(2):
                case.loss(model, case.batch(step, rank)).backward()
                if stepping is not None:
                    assert set(stepping.stepped) == {"0", "1", "2"} and stepping.stepped[0] != "2"
                optimizer.step()
                optimizer.zero_grad()
            results.append(collect(model, optimizer))
        assert_same_training(results[1], results[0], 0)

    run_ranks(2, rank_main)


def test_one_optimizer_of_several_models_and_of_groups_that_are_added() -> None:
    def rank_main(rank: int) -> None:
        results = []
        for in_backward in (False, True):
            models: list[Any] = [fullshard.fully_shard(seeded(lambda: nn.Linear(5, 5), seed)) for seed in range(3)]
            optimizer = torch.optim.SGD(models[0].parameters(), lr=0.1)
            for model in models[1:]:
                optimizer.add_param_group({"params": list(model.parameters()), "lr": 0.2})
                if in_backward:
                    stepping = fullshard.step_in_backward(model, optimizer)
                    assert fullshard.step_in_backward(models[0], optimizer) is stepping

            def closure(models: Any = models, optimizer: Any = optimizer) -> Tensor:
                optimizer.zero_grad()
                x = torch.ones(2, 5)
                for model in models:
                    x = torch.tanh(model(x))
                x.sum().backward()
                return x.sum()

            for _ in range(2):
                loss = optimizer.step(closure)
            results.append([loss, *(p.full_tensor() for model in models for p in model.parameters())])
            if in_backward:
                stepping.remove()
                closure()
                assert not any(isinstance(p.grad, SteppedGrad) for model in models for p in model.parameters())
        assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))

    run_ranks(2, rank_main)


def test_what_is_refused_at_once() -> None:
    def rank_main(rank: int) -> None:
        model: Any = fullshard.fully_shard(nn.Linear(4, 4))
        parameters = list(model.parameters())
        with pytest.raises(ValueError, match="expected one that treats each element by itself .* found Adafactor"):
            fullshard.step_in_backward(model, torch.optim.Adafactor(parameters))
        with pytest.raises(TypeError, match=r"expected a torch.optim.Optimizer, found Linear"):
            fullshard.step_in_backward(model, nn.Linear(1, 1))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="differentiable=False, found True"):
            fullshard.step_in_backward(model, torch.optim.AdamW(parameters, differentiable=True))
        for other in (nn.Linear(4, 4), fullshard.fully_shard(nn.Linear(4, 4))):
            with pytest.raises(ValueError, match=r"with parameters of the optimizer, found (FSDP)?Linear with . units"):
                fullshard.step_in_backward(other, torch.optim.AdamW(parameters))
        fullshard.step_in_backward(model, torch.optim.AdamW(parameters))
        with pytest.raises(ValueError, match="no other optimizer steps in backward, found Linear"):
            fullshard.step_in_backward(model, torch.optim.AdamW(parameters))

    run_ranks(2, rank_main)


def test_hooks_of_gradients_run_before_the_step_and_may_change_it() -> None:
    case = BY_NAME["residual"]

    def rank_main(rank: int) -> None:
        results = []
        for in_backward in (False, True):
            model: Any = case.shard(case.build(), fullshard.fully_shard)
            seen: list[str] = []

            def clamp(p: Any, seen: list[str] = seen) -> None:
                p.grad.to_local().clamp_(-3e-2, 3e-2)
                seen.append("gradient")

            for p in model.parameters():
                p.register_hook(lambda gradient: 2 * gradient)
                p.register_post_accumulate_grad_hook(clamp)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer.register_step_pre_hook(lambda *_, seen=seen: seen.append("step"))
            if in_backward:
                fullshard.step_in_backward(model, optimizer)
            for step in range(2):
                case.loss(model, case.batch(step, rank)).backward()
                optimizer.step()
                optimizer.zero_grad()
            results.append((seen, collect(model, optimizer)))
        assert results[0][0] == results[1][0] == 2 * [*["gradient"] * len(list(model.parameters())), "step"]
        assert_same_training(results[1][1], results[0][1], 0)

    run_ranks(2, rank_main)


class Fault(RuntimeError):
    """Raised on purpose."""


@behaviour(
    "`fullshard.step_in_backward`: a backward that fails half way names the modules that it stepped",
    area="failures",
    torch="none",
    reason="torch has no such function",
)
@pytest.mark.parametrize("world", [1, 2])
@use_options(reductions_in_flight=1)
def test_a_backward_that_fails_half_way(world: int) -> None:
    """`accept()` goes on from there; after a checkpoint was loaded the training is what it would have been."""
    case = BY_NAME["residual"]

    def fail(gradient: Tensor) -> None:
        raise Fault

    def rank_main(rank: int) -> None:
        results = []
        for accepts in (True, False):
            model: Any = case.shard(case.build(), fullshard.fully_shard)
            optimizer = optimizer_of(model)
            stepping = fullshard.step_in_backward(model, optimizer)

            def step(number: int, model: Any = model) -> None:
                case.loss(model, case.batch(number, rank)).backward()

            step(0)
            assert set(stepping.stepped) == {"0", "1", "2"} and stepping.stepped[0] == "2"
            optimizer.step()
            before = collect(model, optimizer)
            saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
            weights = {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}
            handle = model[0].up.register_forward_hook(lambda _m, _a, output: output.register_hook(fail) and None)
            with pytest.raises(Fault):
                step(1)
            handle.remove()
            # The reduction of module 1 was in flight, that of module 2 was complete.
            assert stepping.stepped == ("2",)
            for use in (lambda: step(1), optimizer.step, stepping.remove):  # noqa: B023
                with pytest.raises(RuntimeError, match=r"after the step of 1 of 4 modules \(2\)"):
                    use()
            with torch.no_grad():
                case.loss(model, case.batch(1, rank))
            after = collect(model, optimizer)
            for name, value in after.params.items():
                changed = not torch.equal(value, before.params[name])
                assert changed == name.startswith("2."), name
            stepping.accept()
            optimizer.zero_grad()
            if not accepts:
                with torch.no_grad():
                    for name, p in model.named_parameters():
                        full = weights[name]
                        p.copy_(torch.distributed.tensor.distribute_tensor(full, p.device_mesh, p.placements))
                set_optimizer_state_dict(model, optimizer, saved)
            step(1)
            optimizer.step()
            optimizer.zero_grad()
            results.append(collect(model, optimizer))
        plain: Any = case.shard(case.build(), fullshard.fully_shard)
        optimizer = optimizer_of(plain)
        for number in range(2):
            case.loss(plain, case.batch(number, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same_training(results[1], collect(plain, optimizer), 0)

    run_ranks(world, rank_main)


def test_an_optimizer_that_raises_in_the_middle_of_its_step_may_have_written() -> None:
    class Interrupted(torch.optim.SGD):
        fails = False

        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            if self.fails:
                raise Fault
            return result

    case = BY_NAME["residual"]

    def rank_main(rank: int) -> None:
        model: Any = case.shard(case.build(), fullshard.fully_shard)
        optimizer = Interrupted(model.parameters(), lr=0.1)
        fullshard.step_in_backward(model, optimizer, elementwise=True)
        case.loss(model, case.batch(0, rank)).backward()
        optimizer.step()
        optimizer.fails = True
        with pytest.raises(Fault):
            case.loss(model, case.batch(1, rank)).backward()
        optimizer.fails = False
        with pytest.raises(RuntimeError, match=r"after the step of 1 of 4 modules"):
            case.loss(model, case.batch(1, rank)).backward()

    run_ranks(2, rank_main)
