"""A causal language model of a Hugging Face folder: what is refused of it, the model with its adapters, sharded.

```
folder: config.json, tokenizer, safetensors -> AutoModelForCausalLM on the meta device -> adapters of PEFT
        -> prepare_fully_shard: its blocks are units, each rank reads its rows of the files
4 bits: from_pretrained of bitsandbytes, whole on each rank -> adapters -> prepare_fully_shard cuts what is there
```

Everything that names what is wrong is one line, and comes before memory is allocated.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard import Prepared, prepare_fully_shard
from fullshard.checkpoint import CheckpointError, CheckpointMismatch
from fullshard.checkpoint.formats import HfSource
from fullshard.keys import show
from fullshard.migrate.config import InitialisationKeys
from fullshard.migrate.declared import broken_rules
from fullshard.program import Program
from fullshard.train.adapter_keys import ALL_LINEAR
from fullshard.train.config import Config, ConfigError, invalid
from fullshard.train.folder_tokenizer import FolderTokenizer, quiet_transformers, read_tokenizer
from fullshard.train.metrics import installed
from fullshard.train.model import Llama, flop_per_token
from fullshard.train.process import World
from fullshard.train.shapes import hugging_face

_FLOATS = ("float32", "bfloat16", "float16", "float64")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_NEEDS = {
    "transformers": 'model.folder needs it: pip install "fullshard[hf]"',
    "peft": "adapters.method needs it: pip install peft",
    "bitsandbytes": 'adapters.method = "qlora" needs it: pip install bitsandbytes',
}


@dataclass(frozen=True)
class Pretrained:
    """A folder that was looked at. `told`: its configuration, of transformers."""

    config: Config
    path: Path
    told: Any
    tokenizer: FolderTokenizer

    @property
    def adapters(self) -> bool:
        return self.config.adapters.method != "none"

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.config.model.dtype)
        return found

    def fingerprint(self) -> str:
        """A digest of the weights: without the same base adapters mean nothing."""
        with HfSource(self.path) as source:
            return source.fingerprint()

    def plain(self, *, adapters: bool = True, device: str = "meta") -> nn.Module:
        """The model, without values on the meta device, not sharded. Raises `ConfigError`."""
        transformers = quiet_transformers()
        with torch.device(device):
            try:
                model: nn.Module = transformers.AutoModelForCausalLM.from_config(
                    self.told, dtype=self.dtype, trust_remote_code=False
                )
            except (ValueError, ImportError) as error:
                raise self._invalid(f"transformers makes no causal language model of it: {_line(error)}") from None
            return self.adapted(model) if adapters and self.adapters else model.train()

    def quantised(self, device: torch.device) -> nn.Module:
        """The model with a base in 4 bits, whole on this rank. The same on all: adapters are drawn from the seed."""
        transformers = quiet_transformers()
        try:
            model, found = transformers.AutoModelForCausalLM.from_pretrained(
                self.path,
                dtype=self.dtype,
                device_map={"": device},
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                quantization_config=transformers.BitsAndBytesConfig(
                    load_in_4bit=True,
                    bnb_4bit_quant_type="nf4",
                    bnb_4bit_use_double_quant=True,
                    bnb_4bit_compute_dtype=self.dtype,
                ),
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise self._invalid(f"its weights do not fit its config.json: {_line(error)}") from None
        # Of these transformers draws new values, and says so in a warning.
        if left := sorted(found["missing_keys"]):
            raise self._invalid(f"its weights do not fit its config.json: missing: {', '.join(left[:3])}")
        torch.manual_seed(self.config.training.seed)
        return self.adapted(model)

    def adapted(self, model: nn.Module) -> nn.Module:
        """`model` under PEFT, as `config.adapters` says. Raises `ConfigError`, for names that match nothing too."""
        peft, keys = importlib.import_module("peft"), self.config.adapters
        for key in ("targets", "modules_to_save"):
            for name in getattr(keys, key):
                if name != ALL_LINEAR:
                    _refuse_unmatched(model, f"adapters.{key}", name)
        lora = peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=keys.rank,
            lora_alpha=keys.alpha,
            lora_dropout=keys.dropout,
            target_modules=ALL_LINEAR if ALL_LINEAR in keys.targets else list(keys.targets),
            modules_to_save=list(keys.modules_to_save) or None,
        )
        try:
            adapted: nn.Module = peft.get_peft_model(model, lora)
        except ValueError as error:
            raise invalid("adapters.targets", list(keys.targets), f"PEFT refuses it: {_line(error)}") from None
        if any(type(module).__name__ == "ParamWrapper" for module in adapted.modules()):
            problem = "PEFT adapts parameters of experts that its forward sets, and a sharded one is read alone; name"
            problem += " linear layers"
            raise invalid("adapters.targets", list(keys.targets), problem, show(_linear_names(model)))
        return adapted.train()

    def sharded(self, mesh: DeviceMesh, device: torch.device) -> nn.Module:
        """The model of `prepared`."""
        return self.prepared(mesh, device).model

    def prepared(self, mesh: DeviceMesh, device: torch.device, *, quantised: bool | None = None) -> Prepared:
        """The model with its values, divided as [sharding.parallelism] says, and sharded over `mesh`. Collective.
        Raises `ConfigError` on every rank for files that lack weights of it, and for degrees that do not fit it.
        `quantised`: the base in 4 bits (default: as `adapters.method` says)."""
        in_4_bits = self.config.adapters.method == "qlora" if quantised is None else quantised
        model = self.quantised(device) if in_4_bits else self.plain()
        values = InitialisationKeys(source="given")
        if not in_4_bits:
            values = InitialisationKeys(source="pretrained", path=str(self.path), seed=self.config.training.seed)
        try:
            prepared = prepare_fully_shard(
                model, config=replace(self.config.sharding, initialisation=values), mesh=mesh, show=False
            )
        except CheckpointMismatch as error:
            more = f", and {len(error.problems) - 1} more" if len(error.problems) > 1 else ""
            raise self._invalid(f"its weights do not fit its config.json: {error.problems[0]}{more}") from None
        except CheckpointError as error:
            raise self._invalid(_line(error)) from None
        model.train()
        return prepared

    def on(self, world: World) -> tuple[nn.Module, World]:
        """The model of `prepared` on the processes of a run, and these with what cuts its sequences. Collective."""
        prepared = self.prepared(world.mesh, world.device)
        sequences = None if world.sequences is None else prepared.sequences
        return prepared.model, world._replace(sequences=sequences)

    def check_axes(self, world: int) -> None:
        """Raise `ConfigError` for degrees that do not fit the model on `world` processes."""
        config = self.config
        if config.sharding.parallelism.beyond_data:
            length = config.training.sequence_length
            broken, nearest = broken_rules(self.plain(), config.sharding.parallel, world, sequence=length)
            if broken:
                raise ConfigError(f"sharding.{broken[0]}" + (f"; {nearest}" if nearest else ""))

    def _invalid(self, problem: str) -> ConfigError:
        return invalid("model.folder", self.config.model.folder, problem)


# ---- what is refused ---------------------------------------------------------------------------------------------


def open_pretrained(config: Config, *, fetch: bool = True) -> Pretrained:
    """The folder that `model.folder` names. `fetch`: a name on the hub may be downloaded; else it was before. Raises
    `ConfigError` for one that cannot be trained, before its weights are read."""
    method = config.adapters.method
    for package in ("transformers", *(["peft"] if method != "none" else []), *(["bitsandbytes"] * (method == "qlora"))):
        if not installed(package):
            raise ConfigError(f"the package {package} is not installed; {_NEEDS[package]}")
    path = _path(config, fetch=fetch)
    _check_files(config, path)
    transformers = quiet_transformers()
    try:
        told = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise invalid("model.folder", str(path), f"transformers cannot read its config.json: {_line(error)}") from None
    told.__dict__.pop("quantization_config", None)
    words = read_tokenizer(path, "model.folder", str(path))
    text = told.get_text_config()
    if getattr(told, "output_router_logits", False):
        problem = (
            "its config.json has output_router_logits = true, a loss that the trainer does not add; set it to false"
        )
        raise invalid("model.folder", str(path), problem)
    if len(words) > text.vocab_size:
        problem = f"its tokenizer has {len(words):,} tokens, and its model {text.vocab_size:,}"
        raise invalid("model.folder", str(path), problem)
    longest, length = getattr(text, "max_position_embeddings", None), config.training.sequence_length
    if isinstance(longest, int) and 0 < longest < length:
        raise invalid("training.sequence_length", length, f"the model of {path} has {longest} positions", str(longest))
    return Pretrained(config, path, told, FolderTokenizer(words, text.vocab_size))


def check_pretrained_folder(config: Config, world: int) -> None:
    """Refuse what can be refused before any of `world` processes starts. Raises `ConfigError`."""
    found = open_pretrained(config)
    found.plain()
    found.check_axes(world)


def _path(config: Config, *, fetch: bool) -> Path:
    name = config.model.folder
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise invalid("model.folder", name, "expected a folder, found a file", show(str(path.parent)))
    if path.is_absolute() or name.count("/") != 1 or name.startswith("."):
        raise invalid("model.folder", name, "there is no such folder")
    if not installed("huggingface_hub"):
        problem = "there is no such folder, and for a name on the hub huggingface_hub is not installed"
        raise invalid("model.folder", name, problem)
    hub = importlib.import_module("huggingface_hub")
    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    try:
        return Path(hub.snapshot_download(name, allow_patterns=patterns, local_files_only=not fetch))
    except Exception as error:
        problem = f"there is no such folder, and the hub gives none of that name: {_line(error)}"
        raise invalid("model.folder", name, problem) from None


def _check_files(config: Config, path: Path) -> None:
    name = config.model.folder
    files = sorted(file.name for file in path.iterdir())
    if "config.json" not in files:
        found = ", ".join(files[:5]) or "nothing"
        raise invalid("model.folder", name, f"expected config.json of a model of transformers in it, found {found}")
    if not any(file.endswith(".safetensors") for file in files):
        pickles = [file for file in files if file.endswith(_PICKLES)]
        found = f"pickles, {pickles[0]}, which are not read" if pickles else "none"
        problem = f"expected safetensors files in it, found {found}; save_pretrained of transformers writes them"
        raise invalid("model.folder", name, problem)
    if not any(file.startswith(("tokenizer", "vocab")) or file.endswith(".model") for file in files):
        raise invalid("model.folder", name, "expected a tokenizer in it, found none; its save_pretrained writes one")
    try:
        told = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise invalid("model.folder", name, f"its config.json is not valid JSON: {error}") from None
    quantised = told.get("quantization_config") if isinstance(told, dict) else None
    # transformers reads GGUF into floating point, and what it then saves keeps the mark.
    if quantised and quantised.get("quant_method") != "gguf":
        way = quantised.get("quant_method") or "an unnamed method"
        problem = f"expected weights in floating point, found them quantised by {way}"
        instead = 'a folder that is not; adapters.method = "qlora" makes 4 bits of it'
        raise invalid("model.folder", name, problem, instead)
    if (path / "adapter_config.json").is_file():
        raise invalid("model.folder", name, "expected a model, found adapters of PEFT beside it; merge them first")
    try:
        with HfSource(path) as source:
            odd = [f"{key} in {info.dtype}" for key, info in source.tensors.items() if info.dtype not in _FLOATS]
    except CheckpointError as error:
        raise invalid("model.folder", name, _line(error)) from None
    if odd:
        raise invalid("model.folder", name, f"expected weights in {', '.join(_FLOATS)}, found {odd[0]}")


def _refuse_unmatched(model: nn.Module, key: str, wanted: str) -> None:
    names = [name for name, module in model.named_modules() if getattr(module, "weight", torch.empty(0)).ndim > 1]
    if any(name == wanted or name.endswith(f".{wanted}") for name, _ in model.named_modules()):
        return
    ends = list(dict.fromkeys(name.rpartition(".")[2] for name in names if not name.rpartition(".")[2].isdecimal()))
    near = difflib.get_close_matches(wanted, ends, n=3, cutoff=0.5)
    there = ", ".join(show(end) for end in near or ends)
    raise invalid(key, wanted, "it matches no module of the model", there)


def _linear_names(model: nn.Module) -> list[str]:
    """The ends of the names of the linear layers in blocks, in the model without or with adapters."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and ".layers." in name]
    ends = [name.removesuffix(".base_layer").rpartition(".")[2] for name in names if ".lora_" not in name]
    return list(dict.fromkeys(ends))


def _line(error: BaseException) -> str:
    """The first sentence of an error, which other packages spread over lines."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def opened_on_all(config: Config, world: World) -> Pretrained:
    """The same on each rank of a run: rank 0 downloads what has to be. Raises `ConfigError`, on all ranks for what rank
    0 finds, and `RuntimeError` on a rank that has other files, such as a host with an older copy of the folder."""
    problem, found = "-", None
    if world.rank == 0:
        try:
            found = open_pretrained(config)
        except ConfigError as error:
            problem = str(error)
        world.store.set("model.folder", problem)
    elif (problem := world.store.get("model.folder").decode()) == "-":
        found = open_pretrained(config, fetch=False)
    if found is None:
        raise ConfigError(problem)
    # Each rank reads config.json and the tokenizer by itself, and weights in 4 bits whole: nothing else compares them.
    digest = hashlib.sha256((found.path / "config.json").read_bytes()).hexdigest()
    world.agree("SHA-256 of config.json of model.folder", digest)
    world.agree("SHA-256 of the tokenizer of model.folder", found.tokenizer.fingerprint())
    world.agree("digest of the weights of model.folder", found.fingerprint())
    return found


# ---- in the steps ------------------------------------------------------------------------------------------------


def logits_of(model: nn.Module, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
    """Tokens (B, T) -> logits (B, T, V), of the trainer's model or one of a folder. Where a token is `IGNORED`, any
    other is read: no logit that counts comes after it."""
    found: Tensor
    if isinstance(model, Llama):
        found = model(tokens) if positions is None else model(tokens, positions)
    else:
        further: dict[str, Tensor] = {}
        if positions is not None:
            # With a mask it takes positions that jump for those of one sequence.
            further = {"position_ids": positions.expand(len(tokens), -1), "attention_mask": torch.ones_like(tokens)}
        found = model(input_ids=tokens.clamp(min=0), use_cache=False, **further).logits
    return found


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode, inside. Layers of bitsandbytes stay in training mode, which has no dropout: in the
    other they pack their weights, which a unit only holds for one use."""
    changed = [module for module in model.modules() if module.training and not _in_4_bits(module)]
    for module in changed:
        module.training = False
    try:
        yield
    finally:
        for module in changed:
            module.training = True


def numel_of(model: nn.Module) -> int:
    """The elements of all parameters, where a weight in 4 bits counts what it stands for."""
    seen: dict[int, int] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            seen[id(parameter)] = parameter.numel()
            if name == "weight" and _in_4_bits(module):
                seen[id(parameter)] = int(module.in_features) * int(module.out_features)  # type: ignore[arg-type]
    return sum(seen.values())


def flop_of(model: nn.Module, numel: int, context: int) -> float:
    """Floating-point operations per trained token: `flop_per_token` of the trainer's model; of one of a folder, where
    frozen weights have no gradient: 4·N + 2·(trained elements) + 6·L·T·D. Of experts, those count that a token has."""
    if isinstance(model, Llama):
        return flop_per_token(model.shape, numel)
    told = model.config.get_text_config()  # type: ignore[operator, union-attr]
    experts = getattr(told, "num_local_experts", None) or getattr(told, "num_experts", None) or 1
    used = min(getattr(told, "num_experts_per_tok", None) or experts, experts)
    apart = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name) * (1 - used / experts)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    attention = 6.0 * told.num_hidden_layers * context * told.hidden_size
    return float(4 * (numel - apart) + 2 * min(trained, numel - apart) + attention)


def _in_4_bits(module: nn.Module) -> bool:
    return any(kind.__name__ == "Linear4bit" for kind in type(module).__mro__)


# ---- without training ----------------------------------------------------------------------------------------------


def refuse_4_bits(config: Config, problem: str) -> None:
    """Raise `ConfigError` for a base in 4 bits, with `problem`."""
    if config.adapters.method == "qlora":
        raise invalid("adapters.method", "qlora", problem, show("lora"))


def program_of(config: Config, sequence: int) -> Program:
    """The program of the model for plans: without values, batches of one sequence. Raises `ConfigError`."""
    refuse_4_bits(config, "fullshard plan does not count a base in 4 bits")
    found = open_pretrained(config)
    return replace(hugging_face(found.path / "config.json", sequence), model=found.plain)
