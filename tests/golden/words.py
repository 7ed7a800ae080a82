"""The one table between the words of the golden traces and those of the commands today.

The traces were written at version 0.1.0, and stay byte for byte. Since then the commands have the words of the field,
which are those of FSDP2 where it has one. `parse.py` reads and writes the traces through this table: so a comparison
with them proves that the order of commands is that of 0.1.0, and that nothing but these words changed.
"""

# The word of 0.1.0 -> the word today. Commands that are not named here (wait, reduce) kept theirs.
RENAMED = {
    "gather": "unshard",
    "free": "reshard",
    "drop": "cancel",
    "narrow": "reshard_secondary",
    "widen": "unshard_secondary",
}
# The reverse, to write a trace.
WRITTEN = {today: then for then, today in RENAMED.items()}
