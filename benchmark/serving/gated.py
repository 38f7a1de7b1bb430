"""A server that does all that needs no GPU at once, and the rest when a file appears.

    python -m benchmark.serving.gated --gate FILE [--widened] -- SGLANG FLAGS

Each of a server's processes imports SGLang, the schedulers after the launcher: 10 to 30 s of one core each time, more
than the rest of a start. So a sweep has the servers to come do it early. A scheduler waits for the gate before it
touches its GPU, and ends where its launcher does. --widened: the folders come from `python -m benchmark.widen`.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import sys
import time
from pathlib import Path

from sglang.srt.plugins import load_plugins

GATE = "SGLANG_DDTREE_BENCHMARK_GATE"


def run_scheduler(*args, **kwargs) -> None:
    """SGLang's scheduler process, behind the gate."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    launcher, gate = os.getppid(), Path(os.environ[GATE])
    while not gate.exists():
        if os.getppid() != launcher:
            return
        time.sleep(0.02)
    run_scheduler_process(*args, **kwargs)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmark.serving.gated", description=__doc__)
    parser.add_argument("--gate", required=True, help="its schedulers begin once this file exists")
    parser.add_argument("--widened", action="store_true")
    parser.add_argument("flags", nargs="+", help="of `sglang serve`, after --")
    given = parser.parse_args()
    os.environ[GATE] = given.gate  # for the schedulers
    load_plugins()  # before anything else is imported, as `sglang serve` does
    http_server = importlib.import_module("sglang.srt.entrypoints.http_server")
    http_server.launch_server = functools.partial(
        http_server.launch_server, run_scheduler_process_func=run_scheduler
    )
    if given.widened:
        from benchmark.widen.serve import main as serve

        sys.argv = ["python -m benchmark.widen.serve", *given.flags]
    else:
        from sglang.cli.main import main as serve

        sys.argv = ["sglang", "serve", *given.flags]
    serve()


if __name__ == "__main__":
    main()
