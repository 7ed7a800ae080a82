"""`fullshard migrate CONFIG`: configurations of other libraries, key by key. No torch.

rows.toml    the table: subjects, their cases, and the keys of each library
table        loads it
formats      which library a file is of
entries      the keys of a file, and of those that it names, with their rows
optimizers   what DeepSpeed builds from its file
conversion   findings for each key, and the ShardingConfig that they make
"""
