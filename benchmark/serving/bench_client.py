"""`python -m sglang.bench_serving` any number of times in one process, as importing it takes longer than most runs.

Reads one JSON list of command-line arguments a line from stdin; answers once it is ready, and each line, with one JSON
line on stdout, {"status": 0} or {"status": n, "error": line}. What the tool itself prints goes to stderr.
"""

from __future__ import annotations

import contextlib
import json
import sys

from sglang.bench_serving import cli_main


def run(arguments: list[str]) -> dict:
    sys.argv = ["sglang.bench_serving", *arguments]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            cli_main()
    except SystemExit as e:
        if e.code not in (None, 0):
            return dict(status=1, error=f"it left with status {e.code}")
    except Exception as e:
        return dict(status=1, error=f"{type(e).__name__}: {e}"[:300])
    return dict(status=0)


if __name__ == "__main__":
    print(json.dumps(dict(status=0)), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
