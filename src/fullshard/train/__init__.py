"""The trainer: `fullshard train` and `fullshard generate`.

It uses only the public interface of `fullshard`, like any other program; in the package only the command line imports
this room. Each file has one subject:

| file | subject |
|---|---|
| `cli` | commands, help, exit codes |
| `config` | the keys and their rules; reading TOML and `--set`, printing |
| `elsewhere` | configurations of other libraries, as keys of the trainer |
| `launch` | starting N processes, and reporting how they ended |
| `process` | how one process joins, stops and fails |
| `run` | one run on one rank, from the joined processes to the finished folder |
| `loop` | the steps |
| `optimizer_keys`, `optimizers`, `schedules` | keys of the optimizer; the optimizers; the learning rate |
| `model` | the Llama-like model, and its sharded version |
| `pretrained` | a model of a Hugging Face folder: what is refused of it, its adapters, its sharded version |
| `adapter_keys`, `folder_tokenizer`, `exported` | its keys; its tokenizer; what its run leaves |
| `data` | corpus, tokens, split; the samples of each step |
| `metrics` | the record of a step; memory, peak rates |
| `console` | console output and the loss plot |
| `folder` | the folder of a run: creation, closing, exclusive use; its checkpoints, and what a resumed run may change |
| `sample` | text from a model |
"""
