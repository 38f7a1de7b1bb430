"""Settings that must stand before torch is imported, and the skip of GPU tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
# Engines are forked from this process (see sglang_ddtree/cpu/patches.py), which OpenMP threads would not survive.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["SGLANG_DDTREE_FORK"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not os.path.exists(
    "/dev/nvidia0"
):  # Triton kernels are tested in its interpreter, chosen before they are defined
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser):
    parser.addoption("--exhaustive", action="store_true", help="also the neighbours of cases that always run")


def pytest_collection_modifyitems(config, items):
    import torch

    reasons = {}
    if not torch.cuda.is_available():
        reasons["gpu"] = "needs an NVIDIA GPU"
    if not config.getoption("--exhaustive"):
        reasons["exhaustive"] = "a neighbour of cases that run; --exhaustive runs it too"
    for item in items:
        for marker, reason in reasons.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
