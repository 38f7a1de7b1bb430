"""`sglang serve --help` prints its parser before it loads plugins; this lets it show our flags as well."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys

SERVER_ARGS = "sglang.srt.server_args"


class _AfterServerArgs(importlib.abc.MetaPathFinder):
    """Swaps in our ServerArgs right after SGLang's module has been executed, for a help page only."""

    def find_spec(self, name, path=None, target=None):
        if name != SERVER_ARGS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            from sglang_ddtree.server_args import DDTreeServerArgs

            module.ServerArgs = DDTreeServerArgs

        spec.loader.exec_module = exec_module
        return spec


def install() -> None:
    """Does nothing unless this process is `sglang serve --help`."""
    wants_help = {"-h", "--help"} & set(sys.argv)
    if wants_help and sys.argv[1:2] == ["serve"] and SERVER_ARGS not in sys.modules:
        sys.meta_path.insert(0, _AfterServerArgs())
