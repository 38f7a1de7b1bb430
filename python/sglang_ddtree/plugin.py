"""Entry point of group `sglang.srt.plugins`: SGLang calls `register` in every process before it parses arguments."""

from __future__ import annotations


def register() -> None:
    """Installs the flags, the algorithm DDTREE and the hooks; on a machine without a GPU also the CPU platform."""
    import sglang.srt.entrypoints.engine as engine

    from sglang_ddtree import algorithm, hooks
    from sglang_ddtree.server_args import DDTreeServerArgs
    from sglang_ddtree.verify.features import install_text_only_capture

    if hooks.on_cpu():
        from sglang_ddtree.cpu import patches

        patches.tune_process()
        patches.install_constants()
    hooks.install()
    engine.Engine.server_args_class = DDTreeServerArgs
    algorithm.register()
    install_text_only_capture()
