"""All kernel benchmarks: `python -m benchmark.kernels [--json FILE]`."""

from __future__ import annotations

import argparse
import runpy
from pathlib import Path

import torch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--json", type=Path, help="write one JSON line per row to this file")
path = parser.parse_args().json
if not torch.cuda.is_available():
    raise SystemExit("benchmark/kernels: needs an NVIDIA GPU, and none was found")
if path is not None:
    path.unlink(missing_ok=True)  # both benchmarks append to it
for name in ("bench_gdn", "bench_tree"):
    runpy.run_module(f"benchmark.kernels.{name}", run_name="__main__")
