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
SHARED = "where several calls read one tensor torch adds its gradients up in another order; ours as plain training does"
REPLICAS = "gradients are added inside each replica first, then over replicas"
EACH = "the plain model does not know that gradients are held back, and averages those of each micro-batch"
LOWER = "the plain model computes in float32"
EARLY = "the plain model averages when a backward is over, which is after these hooks"
MUON = "Muon multiplies matrices in bfloat16, and DTensors add such products up in another order"
TWICE = "torch frees weights that a backward with `create_graph` left to the next one: 'out of bounds for storage'"
IDLE = "torch's ranks send messages of different sizes where a parameter is used on some of them alone"
ROOT = "torch's root stays full after a forward without gradients: the average finds plain tensors beside DTensors"
NORM = "the norm is added up over shards, in another order than over whole gradients"


@dataclass(frozen=True)
class Program:
    """Against each oracle: "bits" (equal), "digits" (in float64 they differ by less than half the digits; rounding),
    "differs", "fails" (torch raises) or "none" (it cannot run that, or computes something else). Whatever is not "bits"
    has its reason in `why`.
    `warns`: what fullshard, and it alone, warns of, once or more."""

    ranks: int = 2
    plain: Literal["bits", "digits", "differs", "none"] = "bits"
    torch: Literal["bits", "digits", "differs", "fails", "none"] = "bits"
    why: str = ""
    warns: str = ""


PROGRAMS = {
    "accelerate_loop": Program(),
    "accumulation": Program(),
    "albert": Program(),
    "averaged_weights": Program(),
    "byol": Program(ranks=4, torch="digits", why=ORDER),
    "char_rnn": Program(),
    "checkpoint_resume": Program(),
    "clip_two_towers": Program(),
    "compiled": Program(),
    "convnext": Program(ranks=3, torch="digits", why=ORDER),
    "cpu_offload": Program(),
    "detection": Program(),
    "diffusion_transformer": Program(),
    "distillation": Program(),
    "dlrm": Program(ranks=4, torch="digits", why=ORDER),
    "dpo": Program(),
    "dqn": Program(),
    "early_exit": Program(),
    "energy_model": Program(),
    "expert_parallel": Program(ranks=4, plain="digits", torch="digits", why=f"{REPLICAS}; {ORDER}"),
    "fabric": Program(plain="digits", why=EACH),
    "fourier_operator": Program(),
    "fp16_scaler": Program(plain="none", why=LOWER),
    "full_state_dict": Program(),
    "gan": Program(warns=BUFFERS),
    "gradient_noise": Program(),
    "graph_network": Program(ranks=3, torch="digits", why=ORDER),
    "grpo": Program(),
    "hf_bart": Program(torch="digits", why=SHARED),
    "hf_bert": Program(),
    "hf_clip": Program(),
    "hf_gemma": Program(plain="digits", why=NORM),
    "hf_gpt2": Program(),
    "hf_llama": Program(),
    "hf_lora": Program(),
    "hf_mamba": Program(),
    "hf_mixtral": Program(),
    "hf_qwen2": Program(),
    "hf_qwen3": Program(plain="none", why=LOWER),
    "hf_t5": Program(torch="digits", why=SHARED),
    "hf_vit": Program(),
    "hf_wav2vec2": Program(),
    "hf_whisper": Program(torch="digits", why=SHARED),
    "hsdp": Program(ranks=4, plain="digits", why=REPLICAS),
    "lightning": Program(),
    "lookahead": Program(ranks=4, torch="digits", why=ORDER),
    "lora": Program(),
    "masked_autoencoder": Program(),
    "meta_device": Program(ranks=3, torch="digits", why=ORDER),
    "mixed_precision": Program(plain="none", why=LOWER),
    "mlp_mixer": Program(ranks=1),
    "moco": Program(torch="fails", why=ROOT),
    "moe_dropped_tokens": Program(torch="fails", why=IDLE),
    "multitask": Program(),
    "muon": Program(plain="differs", why=MUON),
    "nanogpt": Program(plain="digits", why=NORM),
    "neural_ode": Program(),
    "normalizing_flow": Program(),
    "optimizer_in_backward": Program(plain="none", why=EARLY),
    "physics_informed": Program(torch="fails", why=TWICE),
    "pipeline": Program(ranks=4, plain="digits", why=EACH),
    "ppo": Program(),
    "progressive_unfreezing": Program(ranks=3, torch="digits", why=ORDER),
    "prompt_tuning": Program(),
    "recomputation": Program(),
    "reptile": Program(ranks=1),
    "resnet": Program(warns=BUFFERS),
    "reward_model": Program(),
    "sam": Program(),
    "seq2seq_gru": Program(torch="digits", why=SHARED),
    "sequence_parallel": Program(ranks=4),
    "skipped_steps": Program(),
    "sparse_attention_lengths": Program(),
    "speech_ctc": Program(ranks=4, torch="digits", why=ORDER),
    "tensor_parallel": Program(ranks=4),
    "triplets": Program(),
    "unet_conditional": Program(),
    "unet_diffusion": Program(),
    "vae": Program(),
    "vision_transformer": Program(),
    "wgan_gp": Program(torch="fails", why=TWICE),
    "word_vectors": Program(ranks=4, torch="digits", why=ORDER),
}
