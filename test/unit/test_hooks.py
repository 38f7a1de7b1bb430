"""The table of contacts: true of the installed SGLang, and loud when it is not."""

from __future__ import annotations

import dataclasses

import pytest
from sglang.srt.plugins import load_plugins
from sglang_ddtree import hooks

load_plugins()


def test_every_contact_is_as_pinned_and_in_force():
    assert hooks.check(applied=True) == []


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"parameters": "self batch on_publish"}, "pinned as (self batch on_publish)"),
        ({"target": hooks.S + "speculative.dflash_worker_v2.DFlashWorkerV2.gone"}, "not found"),
        ({"hook": "sglang_ddtree.verify.gdn.radix_linear_attention_forward"}, "is not in force"),
    ],
)
def test_a_changed_internal_is_named(change, complaint, monkeypatch):
    row = next(c for c in hooks.CONTACTS if c.target.endswith("DFlashWorkerV2.forward_batch_generation"))
    monkeypatch.setattr(hooks, "CONTACTS", (dataclasses.replace(row, **change),))
    problems = hooks.check(applied=True)
    assert len(problems) == 1
    assert complaint in problems[0] and row.why in problems[0]


def test_worker_refuses_to_start_on_a_mismatch(monkeypatch):
    from sglang_ddtree.worker import DDTreeWorker

    monkeypatch.setattr(hooks, "SGLANG_VERSION", "0.0.0")
    with pytest.raises(RuntimeError, match="sglang: version 0.5.17 is installed, 0.0.0 is required"):
        DDTreeWorker(None, 0, None, 0, None)


def test_kernels_do_not_import_sglang():
    import subprocess
    import sys

    code = (
        "import sys, pkgutil, importlib, sglang_ddtree_kernel as k\n"
        "for m in pkgutil.walk_packages(k.__path__, k.__name__ + '.'): importlib.import_module(m.name)\n"
        "assert not [m for m in sys.modules if m.split('.')[0] == 'sglang']"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
