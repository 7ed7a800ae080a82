"""`fullshard migrate CODE.py`: programs that use FSDP1, DDP or torch's FSDP2, explained and rewritten.

arguments    what each argument and call means here: the tables
project      the files of the program, and what names in them stand for
flow         which variables hold wrapped models
plan         the changes of a file, as data
calls        decides about calls | wrapping: about wrapped models | states: about state dicts
rewriting    carries a plan out
patch        all of it: findings and a patch
"""
