"""The command: run the matrix, or a part of it. See the package's docstring."""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.faults import document  # noqa: E402
from tests.faults.run import IMPLEMENTATIONS, Runner, summary, table  # noqa: E402
from tests.faults.table import CASES  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--class", dest="group", help="only this class: the part of an id before the slash")
    parser.add_argument("--case", action="append", default=[], help="only this id, or pattern of ids; repeatable")
    parser.add_argument("--fast", action="store_true", help="only the slice of `make test`")
    parser.add_argument("--implementation", choices=list(IMPLEMENTATIONS), default="fullshard")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each case, instead of a table")
    parser.add_argument("--write", action="store_true", help="write docs/reliability.md, or torch's dated document")
    parser.add_argument("--verbose", action="store_true", help="print the traceback of each rank that ended badly")
    options = parser.parse_args()
    unknown = [wanted for wanted in options.case if not any(fnmatch.fnmatchcase(case.id, wanted) for case in CASES)]
    if unknown:
        parser.error(f"no such case: {', '.join(unknown)}")
    chosen = [
        case
        for case in CASES
        if (not options.case or any(fnmatch.fnmatchcase(case.id, wanted) for wanted in options.case))
        and (not options.group or case.group == options.group)
        and (not options.fast or case.fast)
    ]
    if not chosen:
        parser.error("no case is chosen")
    runner = Runner(options.implementation)
    results, broken = [], 0
    for case in chosen:
        try:
            result = runner.run(case)
        except AssertionError as error:
            print(f"! {case.id}  NOT JUDGED  {error}", flush=True)
            broken += 1
            continue
        results.append(result)
        if options.json:
            print(json.dumps(result.as_json()), flush=True)
        else:
            print(table([result]).splitlines()[0], flush=True)
        if options.verbose:
            for report in result.reports:
                for error in [*report.caught, *([report.error] if report.error else [])]:
                    print(f"--- rank {report.rank} {report.ended}\n{error.trace}")
                if report.ended in ("died", "hung"):
                    print(f"--- rank {report.rank} {report.ended} {report.code}\n{report.output}")
    if not options.json:
        print(summary(results))
    if options.write:
        document.write_torch(results) if options.implementation == "torch" else document.write_page(results)
    return 0 if not broken and all(result.good for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
