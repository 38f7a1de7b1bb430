"""All kernel benchmarks: python -m benchmark.kernels [--json FILE]."""

from __future__ import annotations

import sys
from pathlib import Path

if __package__:
    from benchmark.kernels import bench_gdn, bench_tree
else:  # python benchmark/kernels
    sys.path.insert(0, str(Path(__file__).parent))
    import bench_gdn
    import bench_tree

bench_gdn.main()
bench_tree.main()
