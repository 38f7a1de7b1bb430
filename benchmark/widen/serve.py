"""`sglang serve` for a folder of `python -m benchmark.widen`: the same flags, weights made while loading.

    python -m benchmark.widen.serve --model-path DIR/target --speculative-draft-model-path DIR/draft ...

SGLang's command line has a fixed list of load formats; its arguments take a class, until they are resolved.
"""

from __future__ import annotations

import argparse
import os

from sglang.launch_server import run_server
from sglang.srt import server_args
from sglang.srt.plugins import load_plugins
from sglang.srt.utils import kill_process_tree

from benchmark.widen.loader import GeneratedLoader


def main() -> None:
    load_plugins()
    parser = argparse.ArgumentParser(prog="python -m benchmark.widen.serve")
    server_args.ServerArgs.add_cli_args(parser)
    given = parser.parse_args()
    given.load_format = GeneratedLoader
    try:
        run_server(server_args.ServerArgs.from_cli_args(given))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
