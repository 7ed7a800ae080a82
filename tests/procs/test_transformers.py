"""transformers: a Llama trained, asked to generate and saved in shards does what it does whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import fullshard
from tests.harness import tolerance
from tests.harness.behaviours import behaviour
from tests.harness.implementations import FULLSHARD, TORCH, for_each_implementation
from tests.harness.models import adamw, assert_same_training, collect
from tests.harness.packages import ROWS, llama, loss_of, own, sharded, tokens, train
from tests.harness.pool import pool

IMPLEMENTATIONS = {"torch": TORCH, "fullshard": FULLSHARD}
WORLD, STEPS = 2, 3
TIMEOUT = 110.0

each_tie = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])


def _training(rank: int, impl: str, tied: bool) -> tuple[Any, Any, list[float], list[float], bool]:
    plain, model = llama(tied=tied), sharded(IMPLEMENTATIONS[impl].fully_shard, llama(tied=tied))
    optimizer, whole = adamw(model.parameters()), adamw(plain.parameters())
    losses = train(model, optimizer, rank, dist.get_world_size(), STEPS)
    means = torch.tensor(losses)
    dist.all_reduce(means, op=dist.ReduceOp.AVG if dist.get_backend() == "nccl" else dist.ReduceOp.SUM)
    expected = train(plain, whole, None, dist.get_world_size(), STEPS)
    together = model.lm_head.weight is model.get_input_embeddings().weight
    return (
        collect(model, optimizer),
        collect(plain, whole),
        (means / dist.get_world_size()).tolist(),
        expected,
        together,
    )


@pytest.mark.sample(1)
@behaviour("transformers: a Llama, tied and untied, trains as one process", area="packages")
@for_each_implementation
@each_tie
def test_a_llama_trains_as_one_process_does(impl: Any, tied: bool) -> None:
    for actual, expected, losses, whole, together in pool(WORLD).run(_training, impl.name, tied, timeout=TIMEOUT):
        assert_same_training(actual, expected)
        assert losses == pytest.approx(whole, rel=tolerance.figure(steps=STEPS))
        assert together is tied


def _generating(rank: int, impl: str) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """(how, what the sharded model generates, what the plain one does). Ranks end at different lengths."""
    implementation = IMPLEMENTATIONS[impl]
    plain, model = llama(tied=False).eval(), sharded(implementation.fully_shard, llama(tied=False)).eval()
    prompt = own(tokens(7, WORLD), rank)[:, : 5 + 3 * rank]
    # Rank 0 is over after a few tokens, and has to go on with the others until they are.
    first = plain.generate(prompt[:1], max_new_tokens=10, do_sample=False, eos_token_id=None)
    end = int(first[0, prompt.shape[1] + 3]) if rank == 0 else 2
    ways: dict[str, dict[str, Any]] = {
        "greedy, to the end of sentence": {"do_sample": False, "eos_token_id": end},
        "beams": {"do_sample": False, "num_beams": 3},
        "drawn": {"do_sample": True},
    }
    results = []
    for registered in (False, True):
        if registered:
            implementation.namespace.register_fsdp_forward_method(model, "generate")
        for name, options in ways.items():
            rows = prompt[:1] if "eos_token_id" in options else prompt
            made = []
            for each in (model, plain):
                torch.manual_seed(3)
                made.append(each.generate(rows, max_new_tokens=10, **options))
            results.append((f"{name}, registered {registered}", made[0], made[1]))
    return results


@behaviour("transformers: `generate`, at lengths that differ between ranks", area="packages")
@for_each_implementation
def test_generate(impl: Any) -> None:
    ranks = pool(WORLD).run(_generating, impl.name, timeout=TIMEOUT)
    for results in ranks:
        for how, actual, expected in results:
            assert torch.equal(actual, expected), how
    assert ranks[0][0][1].shape[1] < ranks[1][0][1].shape[1]


def _saving(rank: int, folder: str, tied: bool) -> dict[str, Any]:
    from transformers import LlamaForCausalLM

    plain, model = llama(tied=tied), sharded(fullshard.fully_shard, llama(tied=tied))
    found: dict[str, Any] = {"errors": []}
    shards = model.state_dict()
    for state in (None, shards):
        try:
            model.save_pretrained(folder + "-refused", state_dict=state, is_main_process=rank == 0)
        except RuntimeError as error:
            found["errors"].append(str(error))
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        model.save_pretrained(folder + "-state", state_dict=full)
    with fullshard.full_params(model, rank0_only=True, offload_to_cpu=True):
        model.save_pretrained(folder + "-full", is_main_process=rank == 0)
    with fullshard.full_params(model):
        model.save_pretrained(folder + "-everywhere", is_main_process=rank == 0)
    dist.barrier()
    for way in ("-state", "-full", "-everywhere"):
        back, info = LlamaForCausalLM.from_pretrained(folder + way, output_loading_info=True)
        assert not any(info.values()), info
        equal = {name: torch.equal(value, plain.state_dict()[name]) for name, value in back.state_dict().items()}
        found[way] = (back.config.architectures, all(equal.values()), len(equal))
        assert (back.lm_head.weight is back.get_input_embeddings().weight) is tied
    # And it trains on.
    loss_of(model, own(tokens(0, WORLD), rank)).backward()
    return found


@behaviour(
    "transformers: `save_pretrained` writes full tensors, or says how before it writes anything",
    area="packages",
    torch="none",
    reason="torch's FSDP2 leaves config.json and 'invalid python storage'; with a full state dict it works, too",
)
@each_tie
def test_what_is_saved_is_loaded_by_from_pretrained(tied: bool, tmp_path: Path) -> None:
    folder = str(tmp_path / "model")
    for found in pool(WORLD).run(_saving, folder, tied, timeout=TIMEOUT):
        assert len(found["errors"]) == 2
        for text in found["errors"]:
            assert "model.embed_tokens.weight sharded" in text and "full_params" in text and "full_state_dict" in text
        for way in ("-state", "-full", "-everywhere"):
            assert found[way] == (["LlamaForCausalLM"], True, 21)
    assert not Path(folder + "-refused").exists()


def _outputs(rank: int, impl: str) -> tuple[str, Any, Any, Any, bool]:
    """An output of transformers' own class, whose tensors are cast at the end of forward."""
    implementation = IMPLEMENTATIONS[impl]
    policy = implementation.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model = implementation.fully_shard(llama(tied=False), mp_policy=policy)
    output = model(input_ids=own(tokens(0, dist.get_world_size()), rank), use_cache=True)
    assert output.past_key_values.get_seq_length() == 9
    return (
        type(output).__name__,
        output.logits.dtype,
        tuple(output.logits.shape),
        list(output),
        (output["logits"] is output.logits),
    )


@behaviour("transformers: outputs of its own classes are cast to `output_dtype`", area="packages")
@for_each_implementation
def test_model_outputs_are_cast(impl: Any) -> None:
    for kind, dtype, shape, keys, same in pool(WORLD).run(_outputs, impl.name, timeout=TIMEOUT):
        assert (kind, dtype, same) == ("CausalLMOutputWithPast", torch.float32, True)
        assert shape[:2] == (ROWS, 9) and keys == ["logits", "past_key_values"]
