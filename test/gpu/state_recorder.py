"""SGLang plugin of the GPU tests: writes a request's GDN states to a file when its text has reached a length.

Schedulers are separate processes that load plugins by entry point; `installed` makes one, for the engines started below
it. SGLANG_DDTREE_RECORD names the folder, SGLANG_DDTREE_RECORD_AT the lengths.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from pathlib import Path

import torch

FOLDER, LENGTHS = "SGLANG_DDTREE_RECORD", "SGLANG_DDTREE_RECORD_AT"
_last: dict[int, int] = {}  # of a request slot: the length it was seen at


@contextmanager
def installed(folder: Path, lengths: list[int]):
    """Records one request at a time, the first time that its committed length is at least each of `lengths`."""
    info = folder / "state_recorder-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: state-recorder\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nstate_recorder = state_recorder:register\n")
    saved, path = {name: os.environ.get(name) for name in (FOLDER, LENGTHS)}, list(sys.path)
    # A spawned process gets its parent's path, not PYTHONPATH.
    sys.path[:0] = [str(folder), str(Path(__file__).parent)]
    os.environ[FOLDER], os.environ[LENGTHS] = str(folder), ",".join(map(str, lengths))
    try:
        yield
    finally:
        sys.path[:] = path
        for name, value in saved.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if FOLDER in os.environ:
        HookRegistry.register(
            "sglang.srt.model_executor.model_runner.ModelRunner.forward", before_forward, HookType.BEFORE
        )


def before_forward(runner, forward_batch, *args, **kwargs) -> None:
    """Before a decode or verify forward the state covers the committed tokens."""
    mode = forward_batch.forward_mode
    if runner.is_draft_worker or not (mode.is_decode() or mode.is_target_verify()):
        return
    request = int(forward_batch.req_pool_indices[0])
    length = int(forward_batch.seq_lens[0]) - mode.is_decode()
    before = _last.get(request, 0)
    _last[request] = length
    if length < before:  # another request by now
        before = 0
    if not any(before < int(x) <= length for x in os.environ[LENGTHS].split(",")):
        return
    pool = runner.req_to_token_pool
    cache, slot = (
        pool.mamba_pool.mamba_cache,
        pool.get_mamba_indices(forward_batch.req_pool_indices)[0].long(),
    )
    folder = Path(os.environ[FOLDER])
    number = len(list(folder.glob("*.pt")))
    states = dict(length=length, recurrent=cache.temporal[:, slot].cpu(), conv=cache.conv[0][:, slot].cpu())
    torch.save(states, folder / f"{number:04}.pt")
