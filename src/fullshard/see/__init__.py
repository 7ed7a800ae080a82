"""Shows what a record of a run has, without torch: `fullshard see`.

record      the files: what is in them, and how they are read
timeline    what each rank did when: compute, commands, waits, and bytes over time
causes      which messages were waited for, and why; which ranks are late
story       a step in a few lines, and one unit's commands with the rules that caused them
picture     drawings of a step as SVG | page: one HTML page | compare: two runs | chrome: a trace for Perfetto
"""
