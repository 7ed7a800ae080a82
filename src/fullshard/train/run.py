"""One run on one rank, from the joined processes to the finished folder."""

from __future__ import annotations

import math
import os
from dataclasses import asdict
from functools import partial
from pathlib import Path, PurePath
from typing import Any

from torch import nn

from fullshard import report
from fullshard.observe import Recorder, UnitReport, first_and_every
from fullshard.train import data, folder, metrics
from fullshard.train.config import Config, ConfigError, invalid
from fullshard.train.console import Console, clock, console_for, draw_loss, memory_lines
from fullshard.train.exported import export
from fullshard.train.folder_tokenizer import TOKENIZER, FolderTokenizer, open_tokenizer
from fullshard.train.loop import Outcome, Outputs, Trainer
from fullshard.train.metrics import in_units
from fullshard.train.model import as_fsdp, llama_shape, sharded_model
from fullshard.train.optimizers import copies, make_optimizer
from fullshard.train.pipeline import Stages
from fullshard.train.pretrained import Pretrained, logits_of, opened_on_all, without_dropout
from fullshard.train.process import RUN_DIR, STOPPED, Stopped, World, noting_stops
from fullshard.train.sample import generate, load_run

_NO_DIR = "-"  # not "": reading an empty value from a TCPStore waits forever


def train(config: Config, world: World, run_dir: Path) -> None:
    """Train, validate, save, plot and sample. Collective: every rank calls it; rank 0 writes and prints."""
    console = console_for(world.rank, config.metrics.log_every)
    corpus = data.read_corpus(config.data)
    validation = data.read_validation(config.data)
    world.agree("SHA-256 of the corpus", corpus.sha256)
    if validation is not None:
        world.agree("SHA-256 of the validation", validation.sha256)
    found_in = opened_on_all(config, world) if config.model.folder else None
    tokenizer = _tokenizer(config, world, corpus, run_dir) if found_in is None else found_in.tokenizer
    split = data.tokenize(corpus, tokenizer, config.data.validation_fraction, validation)
    stages = Stages(config, world) if config.sharding.parallelism.pipeline_parallel_degree > 1 else None
    cut = None if stages is None else stages.cut
    model: nn.Module
    if found_in is not None:
        model, world = found_in.on(world)
    else:
        model = sharded_model(config, tokenizer.vocab, world.mesh, world.device, world.whole, world.sequences, cut)
    optimizer = make_optimizer(model, config.optimizer)
    trainer = Trainer(config, world, model, optimizer, split, tokenizer, stages)
    found = report(trainer.sharded, optimizer)
    for line in () if trainer.pipeline is None else trainer.pipeline.told:
        console.say(line)
    console.say(
        f"{corpus.name}: {corpus.nbytes:,} bytes, SHA-256 {corpus.sha256[:12]}.., "
        f"{len(split.train):,} training and {len(split.validation):,} validation tokens"
    )
    console.say(str(found))
    same = {"corpus_sha256": corpus.sha256, "vocab": tokenizer.vocab, "seed": config.training.seed}
    if validation is not None:
        same["validation_sha256"] = validation.sha256
    if (config.data.tokenizer_folder or corpus.chats) and isinstance(tokenizer, FolderTokenizer):
        same["tokenizer"] = tokenizer.fingerprint()
    if found_in is not None:
        same["base"] = found_in.fingerprint()
    checkpoints = folder.Checkpoints(run_dir, config.checkpoint, world, model, optimizer, same, trainer.micro)
    checkpoints.say = console.say
    after, newest = checkpoints.resume()
    for path, problem in checkpoints.aside:
        console.say(f"damaged, set aside as {path}: {problem}")
    if newest is None and checkpoints.aside:
        console.say("no whole checkpoint is left: beginning anew with step 1")
    if newest is not None:
        console.say(f"continuing after step {after}, from {newest}")
    done = after >= config.training.steps and not (run_dir / "metrics.jsonl").exists()
    if world.largest([float(done and world.rank == 0)])[0]:
        # The folder of another run that was given as this one's checkpoints has nothing left to do, and no figures.
        problem = f"its run is complete after {after} steps, and training.steps asks for no more"
        raise invalid("checkpoint.folder", config.checkpoint.folder, problem)
    outputs = Outputs(console, recorder=_recorder(config, trainer, run_dir, after))
    if world.rank == 0:
        folder.forget_steps_after(run_dir, after)
        folder.open_manifest(
            run_dir,
            {
                **_facts(config, world, corpus, split, found.units, trainer.numel),
                "resumed_after_step": after,
                "set_aside": [PurePath(path).name for path, _ in checkpoints.aside],
            },
        )
        outputs = _outputs(config, outputs, run_dir, after)
    try:
        with noting_stops(config.checkpoint.grace_seconds):
            outcome = trainer.run(outputs, checkpoints, after=after)
    except Stopped as stop:
        if world.rank == 0:
            folder.close_manifest(run_dir, STOPPED, reason=str(stop), last_step=stop.step)
        world.total([0.0])  # wait until it is written: the first process to end makes the agent end all
        raise
    finally:
        outputs.close()
    _finish(trainer, console, run_dir, tokenizer, outcome, found_in)


def agreed_run_dir(config: Config, world: World) -> Path:
    """The run folder, the same on every rank: created by the launcher or, under torchrun, by rank 0.

    Raises `ConfigError` on rank 0 if it cannot be created, and `ConfigError` without text on the others.
    """
    if RUN_DIR in os.environ:
        return Path(os.environ[RUN_DIR])
    if world.rank == 0:
        try:
            path = folder.make_run_dir(config)
        except ConfigError:
            world.store.set("run.dir", _NO_DIR)
            raise
        world.store.set("run.dir", str(path))
        return path
    answer = world.store.get("run.dir").decode()
    if answer == _NO_DIR:
        raise ConfigError("")
    return Path(answer)


def _tokenizer(config: Config, world: World, corpus: data.Corpus, run_dir: Path) -> data.Tokenizer:
    """The tokenizer; rank 0 trains a BPE and sends it to the others."""
    if config.data.tokenizer == "bytes":
        return data.ByteTokenizer()
    if config.data.tokenizer_folder:
        words = open_tokenizer(config.data)
        world.agree("SHA-256 of the tokenizer", words.fingerprint())
        if world.rank == 0:
            words.inner.save_pretrained(run_dir / TOKENIZER)
        return words
    if world.rank == 0:
        json_text = data.train_bpe(corpus.texts, config.data.bpe_vocab)
        folder.write_text(run_dir / "tokenizer.json", json_text)
        world.store.set("tokenizer", json_text)
    return data.BPETokenizer(world.store.get("tokenizer").decode())


def _recorder(config: Config, trainer: Trainer, run_dir: Path, after: int) -> Recorder | None:
    keys = config.metrics
    if not keys.record_first and not keys.record_every:
        return None
    in_full = first_and_every(after + keys.record_first if keys.record_first else 0, keys.record_every)
    return Recorder(trainer.sharded, run_dir / "see", trainer.optimizer, in_full=in_full, first_step=after + 1)


def _outputs(config: Config, outputs: Outputs, run_dir: Path, after: int) -> Outputs:
    console = outputs.console
    outputs.metrics = metrics.MetricsFile(run_dir / "metrics.jsonl")
    if config.metrics.tensorboard and metrics.installed("tensorboard"):
        outputs.tensorboard = metrics.TensorBoard(run_dir / "tensorboard", after + 1)
    elif config.metrics.tensorboard:
        console.say(metrics.missing("tensorboard", "tb", "there are no TensorBoard files"))
    return outputs


def _facts(
    config: Config,
    world: World,
    corpus: data.Corpus,
    split: data.TokenSplit,
    units: tuple[UnitReport, ...],
    numel: int,
) -> dict[str, Any]:
    return {
        "world": {
            "processes": world.size,
            "copies": config.sharding.degrees(world.size)[0],
            "device": world.device.type,
            "backend": "nccl" if world.device.type == "cuda" else "gloo",
        },
        "corpus": {
            "name": corpus.name,
            "sha256": corpus.sha256,
            "bytes": corpus.nbytes,
            "documents": len(corpus.documents) + len(corpus.chats),
            "training_tokens": len(split.train),
            "validation_tokens": len(split.validation),
        },
        "seed": config.training.seed,
        "parameters": numel,
        "units": [asdict(u) for u in units],
    }


def _finish(
    trainer: Trainer,
    console: Console,
    run_dir: Path,
    tokenizer: data.Tokenizer,
    outcome: Outcome,
    found_in: Pretrained | None,
) -> None:
    config, world = trainer.config, trainer.world
    # The parameters of a pipeline are elsewhere too: they are float32.
    nbytes = trained = 4 * trainer.numel
    if trainer.pipeline is None:
        sizes = [(p.numel() * p.element_size(), p.requires_grad) for p in trainer.model.parameters()]
        nbytes, trained = sum(size for size, _ in sizes), sum(size for size, trains in sizes if trains)
    kept = copies(config.optimizer)
    peak = round(world.largest([metrics.peak_memory_nbytes(world.device)])[0])
    written = ["model.safetensors"]
    if found_in is not None:
        written = export(found_in, trainer.model, run_dir, world)
    elif trainer.pipeline is None:
        folder.save_model(run_dir, trainer.model, rank=world.rank)
    elif world.rank == 0:
        # Each process has its stages; the checkpoint of the last step has all of them.
        newest = folder.place_of(folder.folder_of(run_dir, config.checkpoint), config.training.steps)
        folder.save_model_of_checkpoint(run_dir, llama_shape(config, tokenizer.vocab), newest)
    last = outcome.last
    # A model with NaN cannot generate.
    finite = last is None or last.val_loss is None or math.isfinite(last.val_loss)
    text = ""
    if finite and config.sample.tokens and trainer.pipeline is None:
        text = _sample(trainer, tokenizer)
    if world.rank != 0:
        return
    if finite and config.sample.tokens and trainer.pipeline is not None:
        # By the whole model, in this process alone.
        whole, _, _ = load_run(run_dir)
        keys = config.training
        text = generate(whole, tokenizer, config.sample, context=keys.sequence_length, seed=keys.seed)
    last = last or folder.last_record(run_dir)
    records = metrics.read_metrics(run_dir / "metrics.jsonl")
    elsewhere = config.checkpoint.folder
    files = ["metrics.jsonl", "config.toml", "manifest.json", *written, *([] if elsewhere else [folder.CHECKPOINTS])]
    console.say("")
    for line in memory_lines(outcome.held, nbytes, trained, kept):
        console.say(f"rank 0: {line}")
    console.say(f"peak memory of a process: {in_units(peak)}")
    if text:
        folder.write_text(run_dir / "sample.txt", text + "\n")
        files.append("sample.txt")
        console.say(f"\nsample of generated text:\n{text}\n")
    if config.metrics.plot and metrics.installed("matplotlib"):
        draw_loss(records, run_dir / "loss.png")
        files.append("loss.png")
    elif config.metrics.plot:
        console.say(metrics.missing("matplotlib", "plot", "there is no loss.png"))
    assert last.val_loss is not None and last.val_bits_per_byte is not None  # the last step always validates
    nonfinite = [record["step"] for record in records if "nonfinite" in record]
    losses = {name: getattr(last, name) for name in ("loss", "val_loss", "val_bits_per_byte", "val_perplexity")}
    folder.close_manifest(
        run_dir,
        "completed",
        last_step=last.step,
        seconds=outcome.seconds,
        **metrics.without_nan(losses),
        nonfinite_steps=len(nonfinite),
        memory={
            "peak_process_bytes": peak,
            "rank0_measured": asdict(outcome.held.measured),
            "rank0_expected": asdict(outcome.held.expected),
            "unsharded": {
                "parameters": nbytes,
                "gradients": trained,
                "optimizer": None if kept is None else kept * trained,
            },
        },
    )
    if nonfinite:
        updated = "and updated anyway" if config.training.nonfinite == "count" else "and skipped"
        console.say(f"{len(nonfinite)} steps had a NaN or inf, {updated}; the first was step {nonfinite[0]}")
    console.say(
        f"{last.step} steps in {clock(outcome.seconds)}: validation loss {last.val_loss:.4f} nats per token, "
        f"{last.val_bits_per_byte:.4f} bits per byte"
    )
    if config.metrics.record_first or config.metrics.record_every:
        console.say(f"see:        fullshard see {run_dir}")
    console.say(f"run folder: {run_dir} ({', '.join(files)})")
    if elsewhere:
        console.say(f"checkpoints: {elsewhere}")
    console.say(f'generate:   fullshard generate {run_dir} --prompt "{config.sample.prompt}"')


def _sample(trainer: Trainer, tokenizer: data.Tokenizer) -> str:
    """Text from the sharded model. Collective; the text is the same on every rank and used on rank 0."""
    keys = trainer.config.training
    sample, device = trainer.config.sample, trainer.world.device
    with without_dropout(trainer.model):
        text = generate(
            partial(logits_of, trainer.model),
            tokenizer,
            sample,
            context=keys.sequence_length,
            seed=keys.seed,
            device=device,
            whole=trainer.world.whole is not None,
        )
    as_fsdp(trainer.model).reshard()
    return text
