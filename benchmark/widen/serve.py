"""`sglang serve` for a folder of `python -m benchmark.widen`: the same flags, weights made while loading.

    python -m benchmark.widen.serve --model-path DIR/target --speculative-draft-model-path DIR/draft ...

SGLang's command line has a fixed list of load formats, its arguments take a class.
"""

from __future__ import annotations

import os
import sys

from sglang.launch_server import run_server
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args
from sglang.srt.utils import kill_process_tree

from benchmark.widen.loader import GeneratedLoader


def main() -> None:
    load_plugins()
    server_args = prepare_server_args(sys.argv[1:])
    server_args.load_format = GeneratedLoader
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
