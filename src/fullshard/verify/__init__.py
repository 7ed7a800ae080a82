"""Equality of sharded and plain training, on the user's own model.

strategy     one way to shard, as text
setting      one run of one library, and names as the plain model has them
subject      what each rank of a sharded training writes down | exercises: beside its steps | replicas: copies of shards
pipelined    the stages of a rank | merged: one record of all stages
reference    the same steps by plain torch in one process | arithmetic: as the reduction sums
comparison   the first difference | exercised: beside the steps | kernels: where equal bits are expected
experiments  its cause, by trainings with one thing changed | causes: by what the value shows
run          starts the processes | page: tables, JSON, HTML
"""

from .comparison import Difference as Difference
from .comparison import Result as Result
from .run import verify as verify
from .strategy import Strategy as Strategy
from .strategy import parse_strategy as parse_strategy
