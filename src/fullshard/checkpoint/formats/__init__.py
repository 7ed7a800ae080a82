"""Checkpoints of other programs: DCP directories, Hugging Face safetensors, `torch.save` files, read and written.

| file | what |
|---|---|
| `source` | the common interface of all formats: tensors of which parts can be read |
| `pickle_tree` | a reader of pickles that calls nothing |
| `torch_file` | files of `torch.save`, and the archives in them; reading and writing |
| `dcp` | DCP: its metadata and its data as a source; writing it |
| `hf` | safetensors files, and a folder of them with its index |
| `names` | parameter names of other programs; parts of a source under other names |
| `convert` | which format a path holds; any of them to any other, tensor by tensor |
| `readings` | which stored tensors make which tensor of a model |
| `adapters`, `adapter_checkpoints` | models under PEFT: adapters alone or merged; the same from a checkpoint |
| `writings` | which tensors of a model make which of its files |
| `pretrained` | a model on the meta device filled from a folder of safetensors |
| `sharded` | from any of them into a sharded model, and from that to full files |
"""

from __future__ import annotations

from .adapter_checkpoints import AdapterSource
from .convert import (
    FORMATS,
    Format,
    Found,
    RefusedCheckpoint,
    UnknownCheckpoint,
    convert,
    detect,
    open_found,
    open_source,
    prepared,
    write,
)
from .dcp import DcpSource
from .hf import HfSource
from .names import (
    STYLES,
    UNWRAPPED,
    Chosen,
    Renaming,
    head_dim_of,
    llama,
    optimizer_names,
    read_config,
    strip_wrappers,
)
from .pickle_tree import PickleRefused
from .pretrained import load_pretrained
from .sharded import export_full, load_full, load_into, save_full
from .source import FlatParameterCheckpoint, ShardedTensorCheckpoint, Source, TensorInfo, nbytes_of
from .torch_file import TorchSaveRefused, TorchSource

# Recognised but not read; each text names the remedy.
REFUSALS = (PickleRefused, RefusedCheckpoint, FlatParameterCheckpoint, ShardedTensorCheckpoint, TorchSaveRefused)

__all__ = [
    "FORMATS",
    "REFUSALS",
    "STYLES",
    "UNWRAPPED",
    "AdapterSource",
    "Chosen",
    "DcpSource",
    "FlatParameterCheckpoint",
    "Format",
    "Found",
    "HfSource",
    "PickleRefused",
    "RefusedCheckpoint",
    "Renaming",
    "ShardedTensorCheckpoint",
    "Source",
    "TensorInfo",
    "TorchSaveRefused",
    "TorchSource",
    "UnknownCheckpoint",
    "convert",
    "detect",
    "export_full",
    "head_dim_of",
    "llama",
    "load_full",
    "load_into",
    "load_pretrained",
    "nbytes_of",
    "open_found",
    "open_source",
    "optimizer_names",
    "prepared",
    "read_config",
    "save_full",
    "strip_wrappers",
    "write",
]
