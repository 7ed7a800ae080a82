"""The trainer: `fullshard train` and `fullshard generate`.

It uses the public interface of `fullshard` only, like any other program would; nothing in the package but the command
line imports this room. Every file has one subject:

| file | subject |
|---|---|
| `cli` | commands, help, exit codes |
| `config` | the keys and their rules; reading TOML and `--set`, printing |
| `launch` | starting N processes, and saying how they ended |
| `process` | what one process does to join, to stop and to fail |
| `run` | one run on one rank, from the joined processes to the finished folder |
| `loop` | the steps |
| `model` | the Llama-like model, and the same sharded |
| `data` | corpus, tokens, split; which samples belong to which step |
| `metrics` | what is recorded of a step; memory, peak rates |
| `console` | what is shown and drawn |
| `folder` | the folder of a run: made, closed, used by one; its checkpoints, and what a run that continues may change |
| `sample` | text from a model |
"""
