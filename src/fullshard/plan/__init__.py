"""Predicts what a rank holds, sends and waits for in a step, before a launch. The first five need torch, the others
do not.

facts         a user's model as data
tape          one step of it on the meta device, recorded
values        what is in small tensors on the meta device
kernels       attention, dropout and products by the kernels that will run
graph_hooks   what the engine's hooks on inputs and outputs report in backward
description   a model as data: units, parameters, the tape of a step
spans         a tape between the events of the schedule, with and without recomputation
strategy      dials, and what they make of each unit: layouts and messages
machine       hardware as data
simulation    the rules of `schedule` run with clocks and a byte counter: `account`, `clock`, `reductions`
result        a plan: the ledger, times, padding; `checkpoints`: their interval
pipeline      a step of several ranks with a stage or more each, by a table of actions; `stages`: their plans
repeats       a model of many equal blocks from a few of them
sizes         a model at any size of its micro-batch
search        which strategy fits, and which is the fastest
comparison    a plan beside a run, and the machine that would have made it right
questions     `--explain`
rough         the rule of thumb of seed 002
page          a picture and a page
"""

from .machine import find_hardware as find_hardware
from .result import Plan as Plan
from .result import plan_of as plan_of
from .search import Planner as Planner
from .strategy import Strategy as Strategy
from .strategy import units_of as units_of
