"""`fullshard migrate CONFIG`: configurations of other libraries, key by key. No torch.

rules        what a row of a table is
hugging      tables of Accelerate and of the Trainer's fsdp_config
composer     tables of Composer and LLM Foundry
titan        table of torchtitan
deepspeed    table of DeepSpeed's ZeRO
formats      all tables, and which of them a file is in
conversion   a file's findings, and the ShardingConfig that they make
"""
