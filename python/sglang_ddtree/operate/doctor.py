"""`doctor`: does the installed SGLang still fit, what is this machine, and what fits on its GPU?"""

from __future__ import annotations

import os
import platform
import resource
import shutil
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from sglang_ddtree.operate import fits
from sglang_ddtree.operate.terminal import console, refuse
from sglang_ddtree.operate.unit import OperateError

PACKAGES = ("sglang", "torch", "triton", "transformers", "flashinfer-python", "sglang-router")
BUDGETS, CONTEXTS = (15, 31, 64, 128), (4096, 32768, 131072)


def doctor(
    model_path: Annotated[Path | None, typer.Option(help="a target's folder: also print what fits")] = None,
    draft_model_path: Annotated[Path | None, typer.Option(help="its drafter's folder")] = None,
    tp_size: Annotated[int, typer.Option(min=1, help="GPUs per server")] = 1,
    gpu_memory: Annotated[
        float | None, typer.Option(min=1, help="GiB per GPU; left out: this machine's")
    ] = None,
    fraction: Annotated[
        float, typer.Option(min=0.1, max=1.0, help="--mem-fraction-static of the server")
    ] = 0.85,
) -> None:
    """Check every hook against the installed SGLang, and the machine; a line for each problem, and exit 1 on any.

    With a model and its drafter: how many requests fit, by budget and context.
    """
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang_ddtree import hooks

    problems = hooks.check(applied=True)
    for line in (*environment(), *gpus()):
        console.print(line)
    problems += limits()
    for line in problems:
        console.print("problem", line, style="red", markup=False)
    where = "CPU (no GPU found)" if hooks.on_cpu() else "GPU"
    verdict = f"{len(problems)} problems" if problems else "all as pinned"
    console.print(
        f"{len(hooks.contacts())} contacts with sglang {hooks.SGLANG_VERSION} on {where}: {verdict}"
    )
    if model_path or draft_model_path:
        try:
            console.print(what_fits(model_path, draft_model_path, tp_size, gpu_memory, fraction))
        except OperateError as e:
            raise refuse(e) from None
    raise typer.Exit(1 if problems else 0)


def environment() -> list[str]:
    """Versions, cores and memory, one line each."""
    versions = []
    for name in PACKAGES:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            versions.append(f"{name} not installed")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / fits.GIB
    return [
        f"python {platform.python_version()}, " + ", ".join(versions),
        f"{len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB, "
        f"/dev/shm {shutil.disk_usage('/dev/shm').free / fits.GIB:.1f} GiB free, "
        f"systemd {'runs' if Path('/run/systemd/system').is_dir() else 'does not run'} here",
    ]


def gpus() -> list[str]:
    """One line a GPU: the kernels need the shared memory, requests the rest."""
    import torch

    lines = []
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        lines.append(
            f"GPU {i}: {p.name}, sm_{p.major}{p.minor}, {p.total_memory / fits.GIB:.0f} GiB, "
            f"{p.multi_processor_count} SMs, {p.shared_memory_per_block_optin} bytes of shared memory a block"
        )
    return lines


def limits() -> list[str]:
    """What of this machine would stop a server, each with its remedy."""
    import torch

    problems = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        problems.append(
            f"open files: the limit is {hard}; raise it to 65536 (LimitNOFILE= in a unit, ulimit -n)"
        )
    if torch.cuda.device_count() > 1 and shutil.disk_usage("/dev/shm").free < fits.GIB:
        problems.append("/dev/shm: below 1 GiB free, which NCCL needs between GPUs; remount it larger")
    return problems


def what_fits(
    target: Path | None, draft: Path | None, tp: int, gpu_memory: float | None, fraction: float
) -> Table:
    """Requests at a time by budget (rows) and context (columns). Raises OperateError."""
    import torch

    if target is None or draft is None:
        raise OperateError("--model-path and --draft-model-path: give both")
    if gpu_memory is not None:
        size = gpu_memory * fits.GIB
    elif torch.cuda.is_available():
        size = torch.cuda.get_device_properties(0).total_memory
    else:
        raise OperateError("--gpu-memory: no GPU on this machine; give the GiB of the one you ask about")
    s = fits.shapes(target, draft, tp)
    table = Table(
        title=f"requests at a time, {tp} GPU{'s' * (tp > 1)} of {size / fits.GIB:.0f} GiB, fraction {fraction}",
        caption=f"a GPU: weights {s.weights / fits.GIB:.1f} GiB; KV {s.kv_per_token / 1024:.1f} KiB a token; "
        f"GDN state {s.state_per_request / 2**20:.1f} MiB; stash {s.stash_per_row / 2**20:.2f} MiB a row",
    )
    table.add_column("budget", justify="right")
    for context in CONTEXTS:
        table.add_column(f"{context} tokens", justify="right")
    for budget in BUDGETS:
        table.add_row(str(budget), *(str(s.requests(budget, c, size, fraction)) for c in CONTEXTS))
    return table
