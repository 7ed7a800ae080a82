"""Programs of FSDP1, DDP and torch's FSDP2 as users write them, for `fullshard migrate`: tests/procs/test_migrated.py."""
