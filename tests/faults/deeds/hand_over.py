"""What the cases of hand-over do: transfers, weights, averages, sleep, and steps of whole matrices on their owners."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fullshard
from fullshard.comm import exchange
from fullshard.extras import TransferError, matrices, owner_steps
from fullshard.extras.sleep import _asleep
from fullshard.extras.slept_memory import SleptMemory
from tests.faults.actions import Action, local, parameter
from tests.faults.program import Run
from tests.harness.models import seeded
from tests.threads.programs import Model

# Several messages between two ranks.
LIMIT_NBYTES = 64


def replicas(impl: Any) -> dict[str, Any]:
    return {"mesh": init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))}


# ---- transfers -----------------------------------------------------------------------------------------------


def hand_over(run: Run) -> None:
    """To a plain model on each rank, and back: afterwards the values are those of before. A target that a failure
    leaves is lost, or was not touched."""
    if not run.ours:
        return
    target = run.kept.setdefault("target", seeded(Model, 5))
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    given = {"limit_nbytes": LIMIT_NBYTES, **run.kept.get("given", {})}
    move = fullshard.transfer(run.model, target, **given)
    try:
        move.run()
    except TransferError:
        assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items()), "not as before"
        raise
    except BaseException:
        assert all(bool(tensor.isnan().all()) for tensor in target.state_dict().values()), "values are left"
        raise
    for name, tensor in run.model.state_dict().items():
        assert torch.equal(tensor.full_tensor(), target.state_dict()[name]), f"{name} did not arrive"
    fullshard.transfer(target, run.model, limit_nbytes=LIMIT_NBYTES).run()


def hand_over_twice(run: Run) -> None:
    """The first one may fail; the second one restores the target."""
    if run.kept.get("handed"):
        return
    run.kept["handed"] = True
    try:
        hand_over(run)
    except Exception as error:
        assert "rank 1" in str(error) or run.rank == 1, error
        exchange._send = _SEND
    hand_over(run)


def given(**values: Any) -> Action:
    """Other arguments of this rank's transfers."""

    def action(run: Run) -> None:
        run.kept["given"] = values

    return action


def a_name_less(run: Run) -> None:
    run.kept["given"] = {"names": {"layers.1.up.weight": None}}


def half_the_target(run: Run) -> None:
    """The target of this rank computes in half precision."""
    run.kept["target"] = seeded(Model, 5).half()


def large_value(run: Run) -> None:
    """A value that half precision does not have."""
    with torch.no_grad():
        local(parameter(run, "layers.1.up.weight")).view(-1)[0] = 1e6


def without_room(run: Run) -> None:
    def buffer(self: Any) -> Tensor:
        raise torch.OutOfMemoryError("out of memory: tried to allocate 2 GiB")

    exchange.Exchange.buffer = buffer  # type: ignore[method-assign]


_SEND = exchange._send


def in_a_message(then: Action, number: int = 2) -> Action:
    """Do it instead of this rank's message of that number."""

    def action(run: Run) -> None:
        sent = 0

        def sends(group: Any, message: Tensor, peer: int) -> Any:
            nonlocal sent
            sent += 1
            if sent == number:
                then(run)
            return _SEND(group, message, peer)

        exchange._send = sends

    return action


# ---- weights -------------------------------------------------------------------------------------------------


def take_weights(run: Run) -> None:
    """All ranks take the full tensors; before the second bucket a rank may do something else."""
    if run.ours:
        found: dict[str, Tensor] = {}
        for number, bucket in enumerate(fullshard.weights(run.model, bucket_nbytes=1, **run.kept.get("taken", {}))):
            if number == 1 and "in_loop" in run.kept:
                if run.kept.pop("in_loop")(run) == "break":
                    break
            found.update(bucket)
        assert "in_loop" in run.kept or found.keys() <= dict(run.model.named_parameters()).keys()


def in_the_loop(then: Any) -> Action:
    def action(run: Run) -> None:
        run.kept["in_loop"] = then

    return action


def breaks(run: Run) -> str:
    return "break"


def in_half(run: Run) -> None:
    run.kept["taken"] = {"dtype": torch.float16}


# ---- averages ------------------------------------------------------------------------------------------------


def average(run: Run) -> None:
    if run.ours:
        mean = run.kept.setdefault("mean", None) or fullshard.average(run.model, decay=0.5)
        run.kept["mean"] = mean
        mean.update()


def evaluate_with_the_average(run: Run) -> None:
    if run.ours:
        with run.kept["mean"].applied():
            run.evaluate()


def apply_for_the_evaluation(run: Run) -> None:
    """This rank alone evaluates with the average."""
    with run.kept["mean"].applied():
        run.evaluate()


def evaluate(run: Run) -> None:
    if run.rank != 1:
        run.evaluate()


def step_with_the_average(run: Run) -> None:
    if run.ours:
        with run.kept["mean"].applied():
            run.forward_and_backward()
            run.optimizer.step()


# ---- sleep ---------------------------------------------------------------------------------------------------


def sleep(run: Run) -> None:
    if run.ours:
        fullshard.sleep(run.model, run.optimizer, **run.kept.get("slept", {}))


def wake(run: Run) -> None:
    if run.ours:
        fullshard.wake(run.model)


def sleep_with(**values: Any) -> Action:
    def action(run: Run) -> None:
        run.kept["slept"] = values

    return action


def sleep_and_wake(run: Run) -> None:
    sleep(run)
    wake(run)


def no_room_to_wake(run: Run) -> None:
    def allocate(self: Any) -> None:
        raise torch.OutOfMemoryError("out of memory: tried to allocate 2 GiB")

    SleptMemory.allocate = allocate  # type: ignore[method-assign]


def in_the_waking(then: Action) -> Action:
    """Do it instead of bringing back the third storage."""

    def action(run: Run) -> None:
        memory: Any = list(_asleep[run.model]._memory.values())[2]
        memory.gather = lambda: then(run)

    return action


def differ(run: Run) -> None:
    with torch.no_grad():
        local(parameter(run, "layers.1.up.weight")).view(-1)[0] += 1.0


# ---- owners --------------------------------------------------------------------------------------------------


def muon(run: Run) -> Any:
    """Muon of the matrices alone."""
    optimizer = torch.optim.Muon(matrices(run.model), lr=0.02, weight_decay=0.1)
    if run.ours:
        fullshard.step_on_owners(optimizer, model=run.model, chunk_nbytes=run.kept.get("chunk", 256))
    return optimizer


def fewer_matrices(run: Run) -> None:
    run.optimizer = torch.optim.Muon(matrices(run.model)[1:], lr=0.02, weight_decay=0.1)
    fullshard.step_on_owners(run.optimizer, model=run.model, chunk_nbytes=256)


_STEP_WITH = owner_steps.step_with


def in_an_owner_s_step(then: Action, number: int = 1) -> Action:
    """Do it instead of this rank's step of what it owns, once."""

    def action(run: Run) -> None:
        stepped = 0

        def steps(*given: Any) -> None:
            nonlocal stepped
            stepped += 1
            if stepped == number:
                then(run)
            _STEP_WITH(*given)

        owner_steps.step_with = steps

    return action


def gradient_gone(run: Run) -> None:
    parameter(run, "layers.1.up.weight").grad = None


def other_dtype(run: Run) -> None:
    """This rank's state of one matrix is in another dtype, as a load of its own may leave it."""
    state = run.optimizer.state[parameter(run, "layers.1.up.weight")]
    for key, value in state.items():
        if isinstance(value, DTensor):
            state[key] = value.bfloat16()
