"""The fault matrix: one table of cases, each a fault at (rank, step, event) and the one outcome that is right.

    python -m tests.faults                          the table, with the verdict of each case
    python -m tests.faults --case init/seeds        one of them (--class init: one class)
    python -m tests.faults --implementation torch   the same programs on torch's FSDP2
    python -m tests.faults --write                  docs/reliability.md, with torch's column from its dated document

cases.py says what a case is, table/ holds them, program.py is the training that is disturbed, ranks.py runs it on
processes, judge.py computes the verdict.
"""
