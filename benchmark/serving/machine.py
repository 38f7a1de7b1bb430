"""What a figure was measured with: code, versions and hardware."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("sglang-ddtree", "sglang", "torch", "triton", "transformers")


def commit() -> str:
    """The checkout's commit, with `-dirty` where tracked files differ from it; `unknown` in a copy without history."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:  # no git
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


@functools.cache
def gpus() -> tuple[str, ...]:
    """Names of the NVIDIA GPUs that this process may use, without loading torch."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    names = [pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in _visible()]
    return tuple(names)


def _visible() -> list[int]:
    import pynvml

    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen == "":
        return []
    if chosen is None or not all(part.strip().isdecimal() for part in chosen.split(",")):
        return list(range(pynvml.nvmlDeviceGetCount()))
    return [int(part) for part in chosen.split(",")]


def cpu_threads() -> int:
    """OpenMP threads of a server without a GPU: one, unless OMP_NUM_THREADS says otherwise, as the launcher forks its
    scheduler and threads do not survive that (docs/cpu.md)."""
    return int(os.environ.get("OMP_NUM_THREADS", "1"))


def servers_ahead() -> int:
    """How many servers may import SGLang beside the one that starts: two processes of each do, a core each."""
    return max(0, (os.cpu_count() or 1) // 2 - 2) if gpus() else 0


def hardware(tp: int = 1) -> str:
    """One line for a figure's caption: the GPUs in use, or the CPU."""
    if gpus():
        return f"{tp} x {gpus()[0]}"
    threads = f"{cpu_threads()} thread{'s' * (cpu_threads() > 1)}"
    return f"{threads} on {os.cpu_count()} CPU cores ({platform.machine()}), no GPU"


def gpu_memory_gib() -> float | None:
    """Memory in use on the fullest visible GPU, other programs' included; None without a GPU."""
    if not gpus():
        return None
    import pynvml

    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in _visible()]
    return max(pynvml.nvmlDeviceGetMemoryInfo(h).used for h in handles) / 2**30
