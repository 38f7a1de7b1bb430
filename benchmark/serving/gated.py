"""A server that imports SGLang at once, but starts when it is told to: by a line of flags on its standard input.

    python -m benchmark.serving.gated [--widened] -- SGLANG FLAGS

Imports take 10 to 25 s of one core and neither GPU nor memory of note, so a sweep has the next server do them while
the one before it still serves. At the end of its input it ends too. --widened: the folders come from
`python -m benchmark.widen`.
"""

from __future__ import annotations

import argparse
import importlib
import sys

from sglang.srt.plugins import load_plugins


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmark.serving.gated", description=__doc__)
    parser.add_argument("--widened", action="store_true")
    parser.add_argument("flags", nargs="+", help="of `sglang serve`, after --")
    given = parser.parse_args()
    load_plugins()  # before anything else is imported, as `sglang serve` does
    importlib.import_module("sglang.srt.entrypoints.http_server")
    line = sys.stdin.readline()
    if not line:
        return
    flags = given.flags + line.split()
    if given.widened:
        from benchmark.widen.serve import main as serve

        sys.argv = ["python -m benchmark.widen.serve", *flags]
    else:
        from sglang.cli.main import main as serve

        sys.argv = ["sglang", "serve", *flags]
    serve()


if __name__ == "__main__":
    main()
