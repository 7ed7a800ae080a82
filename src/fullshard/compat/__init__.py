"""Programs that cannot change yet: other libraries' call shapes on fullshard's runtime.

`fsdp1`: `FullyShardedDataParallel` and what belongs to it. `composer`: `prepare_fsdp_module`. docs/prepare.md says
what each argument means here.
"""
