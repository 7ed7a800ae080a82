"""Replicas of which one may end without the others: python examples/elastic_replicas.py

Two replicas of a model train together, each sharded over two ranks: a world of its own, as a torchrun of its own would
make it. `set_all_reduce_hook` averages their gradients over a group that this program makes. A replica is killed; the
other one makes the group anew, repeats the step, and trains on with all of the data.
"""

import argparse
import os
import signal
import sys
import time
from datetime import timedelta

import torch
from torch import distributed, multiprocessing, nn

import fullshard

BATCH = 24  # of a step, over all ranks of all replicas: divisible by any number of them
GRACE = 2.0  # seconds that replicas have to come when a group is made anew


class Replicas:
    """The replicas that are alive, on one rank of one of them. `store`: outside of all replicas."""

    def __init__(self, store, replica, members):
        self.store, self.replica, self.members, self.generation = store, replica, members, 0
        self.failed, self.step = False, 0
        self.leads = distributed.get_rank() == 0
        self._connect()

    def _connect(self):
        """A group with the same shard of each replica."""
        line = distributed.PrefixStore(f"{self.generation}/{distributed.get_rank()}", self.store)
        number, world = self.members.index(self.replica), len(self.members)
        self.group = distributed.ProcessGroupGloo(line, number, world, timedelta(seconds=20))

    def hook(self, gradients):
        """For `set_all_reduce_hook`: the mean over replicas. After a failure it does nothing until the next step."""
        if self.failed:
            return
        try:
            self.group.allreduce([gradients]).wait()
            gradients.div_(len(self.members))
        except RuntimeError:  # a replica is gone
            self.failed = True

    def commits(self):
        """After a backward: whether the step counts, which is one decision for all. Otherwise drop the gradients, and
        repeat it with the replicas that are left."""
        self.step += 1
        failed = torch.tensor([float(self.failed)])
        distributed.all_reduce(failed)  # over the ranks of this replica
        decision = [self._decision(bool(failed)) if self.leads else None]
        distributed.broadcast_object_list(decision)
        if decision[0] == b"commit":
            return True
        self.generation += 1
        members = [self._survivors() if self.leads else None]
        distributed.broadcast_object_list(members)
        self.members, self.failed = members[0], False
        if self.replica not in self.members:
            sys.exit("the other replicas continued without this one")
        self.group = None  # its connections end, so nobody waits for this rank there
        self._connect()
        return False

    def _decision(self, failed):
        """The first of "commit", which takes that all replicas had no failure, and "abort"."""
        name = f"decision/{self.generation}/{self.step}"
        if failed:
            return self.store.compare_set(name, "", "abort")
        if self.store.add(f"{name}/ready", 1) == len(self.members):
            return self.store.compare_set(name, "", "commit")
        deadline = time.monotonic() + 30
        while not self.store.check([name]) and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.store.compare_set(name, "", "abort")

    def _survivors(self):
        """The replicas that came in time; the first list that one of them proposes."""
        name, deadline = f"members/{self.generation}", time.monotonic() + GRACE
        self.store.set(f"{name}/{self.replica}", "here")
        came = []
        while len(came) < len(self.members) and time.monotonic() < deadline:
            came = [other for other in self.members if self.store.check([f"{name}/{other}"])]
            time.sleep(0.01)
        chosen = self.store.compare_set(name, "", ",".join(map(str, came)))
        return [int(other) for other in chosen.decode().split(",")]


def make():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(2)))


def batch(step):
    """All samples of a step, by its number: whoever computes them."""
    x = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(step))
    return x, x.roll(1, dims=1)


def train(replicas, steps, at_backward=lambda step: None):
    """Returns the model and which steps were computed twice."""
    model = make()
    for block in model:
        fullshard.fully_shard(block)
    fullshard.fully_shard(model)
    for module in model.modules():
        if isinstance(module, fullshard.FSDPModule):
            module.set_all_reduce_hook(replicas.hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step, repeated = 0, []
    while step < steps:
        ranks = distributed.get_world_size()
        number = replicas.members.index(replicas.replica) * ranks + distributed.get_rank()
        x, wanted = (part[number :: len(replicas.members) * ranks] for part in batch(step))
        loss = (model(x) - wanted).square().mean()
        at_backward(step)
        loss.backward()
        if replicas.commits():
            optimizer.step()
            step += 1
        else:
            repeated.append(step)
        optimizer.zero_grad()
    return model, repeated


def undisturbed(steps):
    """The same training in one process."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        x, wanted = batch(step)
        (model(x) - wanted).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def rank_main(replica, rank, port, ranks, count, steps, killed_at):
    """One process. A replica is a world: its own process group, and nothing of the library reaches beyond it."""
    store = distributed.TCPStore("127.0.0.1", port, is_master=False)
    own = distributed.PrefixStore(f"replica {replica}", store)
    distributed.init_process_group("gloo", store=own, rank=rank, world_size=ranks)
    replicas = Replicas(store, replica, list(range(count)))

    def dies(step):
        if replica == count - 1 and step == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    model, repeated = train(replicas, steps, dies)
    full = dict(fullshard.weights(model).tensors())
    if rank == 0:
        plain = undisturbed(steps)
        error = max(((full[name] - tensor).abs().max() / tensor.abs().max()).item() for name, tensor in plain.items())
        print(
            f"replica {replica}: {steps} steps, steps {repeated} repeated, {len(replicas.members)} of {count} replicas "
            f"left; it differs from an undisturbed training by {error:.1e}"
        )
    distributed.destroy_process_group()
    return full


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2, help="of each replica")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--killed-at", type=int, default=5)
    given = parser.parse_args()
    # Where no replica is: with several machines, a process that outlives them.
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spawn = multiprocessing.get_context("spawn")
    processes = [
        spawn.Process(
            target=rank_main,
            args=(replica, rank, store.port, given.ranks, given.replicas, given.steps, given.killed_at),
        )
        for replica in range(given.replicas)
        for rank in range(given.ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    ended = [process.exitcode for process in processes]
    print("exit codes", ended)
    sys.exit(any(ended[: -given.ranks]))


if __name__ == "__main__":
    main()
