"""Come from anywhere: one call shards a whole model as a configuration says, and others' configurations become ours.

Reading order: `config` (all that can be set, as data), `reading` (from dicts and files), `levels` (names that others
have), `prepare` (the call). What is imported here needs no torch.
"""

from ..keys import ConfigError
from .config import Override, ShardingConfig
from .levels import LEVELS, Level, find_level
from .reading import read_config, read_table, to_dict, to_toml

__all__ = [
    "ConfigError",
    "LEVELS",
    "Level",
    "Override",
    "ShardingConfig",
    "find_level",
    "read_config",
    "read_table",
    "to_dict",
    "to_toml",
]
