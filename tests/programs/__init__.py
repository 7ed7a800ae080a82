"""Programs that train as their users write them, and what each comes to on fullshard.

A program is a file here. It imports from `torch.distributed.fsdp` in one line, and `main()` builds, shards and trains
a small random model, several steps, in the process group that the ranks are in. tests/harness/programs.py runs it with
that line changed; tests/procs/test_programs.py compares what it returns, every parameter, buffer, optimizer state and
loss, with the same program in plain data parallelism (tests/harness/plain.py) and with torch's FSDP2. docs/programs.md
is written from this table: `python -m tests.harness.programs --write`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BUFFERS = "buffers differ between ranks since the training began: nothing averages them"
ORDER = "gloo adds the gradients of more than two ranks in an order of its own; ours are added rank by rank"
AGAIN = "a unit that ran several times is reduced as often by torch, and once, as a sum, by ours"
TWICE = "torch frees weights that a backward with `create_graph` left to the next one: 'out of bounds for storage'"
IDLE = "torch's ranks send messages of different sizes where a parameter is used on some of them alone"
ROOT = "torch's root stays full after a forward without gradients: the average finds plain tensors beside DTensors"
NORM = "the norm is added up over shards, in another order than over whole gradients"


@dataclass(frozen=True)
class Program:
    """Against each oracle: "bits" (equal), "digits" (in float64 they differ by less than half the digits; rounding),
    "differs", "fails" (torch raises) or "none" (it cannot run that). Whatever is not "bits" has its reason in `why`.
    `quick`: in `make test`. `warns`: what fullshard, and it alone, warns of, once or more."""

    ranks: int = 2
    quick: bool = False
    plain: Literal["bits", "digits", "none"] = "bits"
    torch: Literal["bits", "digits", "differs", "fails", "none"] = "bits"
    why: str = ""
    warns: str = ""


PROGRAMS = {
    "accumulation": Program(quick=True),
    "albert": Program(quick=True),
    "averaged_weights": Program(),
    "char_rnn": Program(quick=True),
    "clip_two_towers": Program(),
    "convnext": Program(ranks=3, torch="digits", why=ORDER),
    "detection": Program(quick=True),
    "diffusion_transformer": Program(),
    "distillation": Program(),
    "dlrm": Program(ranks=4, torch="digits", why=ORDER),
    "dpo": Program(quick=True),
    "dqn": Program(quick=True),
    "gan": Program(quick=True, warns=BUFFERS),
    "graph_network": Program(ranks=3, torch="digits", why=ORDER),
    "grpo": Program(),
    "lookahead": Program(quick=True),
    "lora": Program(quick=True),
    "moco": Program(quick=True, torch="fails", why=ROOT),
    "moe_dropped_tokens": Program(quick=True, torch="fails", why=IDLE),
    "nanogpt": Program(quick=True, plain="digits", why=NORM),
    "neural_ode": Program(),
    "normalizing_flow": Program(),
    "physics_informed": Program(quick=True, torch="fails", why=TWICE),
    "ppo": Program(quick=True),
    "reptile": Program(ranks=1),
    "resnet": Program(warns=BUFFERS),
    "reward_model": Program(),
    "sam": Program(quick=True),
    "seq2seq_gru": Program(torch="digits", why=AGAIN),
    "speech_ctc": Program(ranks=4, torch="digits", why=ORDER),
    "unet_diffusion": Program(quick=True),
    "vae": Program(quick=True),
    "vision_transformer": Program(),
    "wgan_gp": Program(quick=True, torch="fails", why=TWICE),
}
