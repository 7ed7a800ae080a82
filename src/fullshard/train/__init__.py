"""The trainer: `fullshard train` and `fullshard generate`.

It uses the public interface of `fullshard` only, like any other program would; nothing in the package imports
this room. Every file has one subject:

| file | subject |
|---|---|
| `cli` | commands, help, exit codes |
| `config`, `config_load` | the keys and their rules; reading TOML and `--set`, printing |
| `launch`, `process` | starting N processes; what one process does to join, to stop and to fail |
| `wake` | stopped processes that were told to end |
| `model`, `recompute` | the Llama-like model, which knows nothing of sharding; recomputed activations |
| `tokenizer`, `data` | bytes or BPE; corpus, split, which samples belong to which step |
| `shard`, `loop` | model -> sharded model; the steps |
| `metrics`, `console`, `plot` | what is recorded, shown and drawn |
| `table`, `facts` | bytes per rank, expected and measured; FLOP and peak rates |
| `folder` | the folder of a run: made, closed, used by one, what a run that goes on in it may change |
| `resume` | checkpoints of a run, and how a later one goes on from them |
| `artifacts`, `sample` | the trained weights; text from a model |
"""
