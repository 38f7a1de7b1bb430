"""Entry point of group `sglang.srt.platforms`: the one hook that runs in every process before sgl_kernel is imported.

On a machine with a GPU it does nothing. Without one it selects SGLang's CPU platform and makes `import sgl_kernel`
work: the CUDA wheels of sgl_kernel load libcuda at import and carry none of the CPU operators that SGLang looks up.
"""

from __future__ import annotations

import os
import sys
import types

_STAND_IN = types.ModuleType("sgl_kernel.load_utils")


def activate() -> None:
    """Called by SGLang while `sglang.srt.utils` is being imported. Returns None: the in-tree platforms are kept."""
    import torch

    from sglang_ddtree import cli_help

    cli_help.install()
    if torch.cuda.is_available() or sys.modules.get("sgl_kernel.load_utils") is _STAND_IN:
        return
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    # Exact comparison with the recurrent state: SGLang keeps conv windows in bf16 even in fp32 runs otherwise.
    os.environ.setdefault("SGLANG_MAMBA_CONV_DTYPE", "float32")
    _import_sgl_kernel_without_libcuda()
    from sglang_ddtree.cpu import ops

    ops.define()


def _import_sgl_kernel_without_libcuda() -> None:
    """sgl_kernel/__init__.py calls two loaders of its load_utils module; stand-ins that load nothing replace them."""
    _STAND_IN._load_architecture_specific_ops = lambda: None
    _STAND_IN._preload_cuda_library = lambda: None
    sys.modules["sgl_kernel.load_utils"] = _STAND_IN
    import sgl_kernel  # noqa: F401
