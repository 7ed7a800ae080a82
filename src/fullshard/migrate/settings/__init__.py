"""`fullshard migrate CONFIG`: configurations of other libraries, key by key. No torch.

rules        what a row of a table is
hugging      tables of Accelerate and of the Trainer's fsdp_config
composer     tables of Composer and LLM Foundry
titan        table of torchtitan
deepspeed    table of DeepSpeed's ZeRO
conversion   which table a file is in, its findings, and the ShardingConfig that they make
"""
