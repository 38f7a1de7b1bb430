"""SGLang's own load tool against a running server, beside what the server counted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import requests
from prometheus_client.parser import text_string_to_metric_families
from support.engines import TARGET
from support.prompts import PROMPTS

from benchmark.serving.prompts import write_custom_dataset


def samples(base: str) -> dict[str, float]:
    """Values of the plugin's metrics, by name and, where there is one, by bucket or phase."""
    found: dict[str, float] = {}
    text = requests.get(base + "/metrics", timeout=30).text
    for family in text_string_to_metric_families(text):
        for s in family.samples:
            if s.name.startswith("sglang_ddtree_"):
                key = s.name + "".join(f"|{s.labels[k]}" for k in ("phase", "le") if k in s.labels)
                found[key] = s.value
                assert s.labels["model_name"] == "demo"
    return found


def bench_serving(base: str, folder: Path) -> tuple[float, float]:
    """tau as bench_serving reports it for a load of eight prompts, and as /metrics has it since the server started.

    base: of a server of the demo pair. folder: for the tool's files.
    """
    rows, result = folder / "prompts.jsonl", folder / "result.jsonl"
    write_custom_dataset(PROMPTS[:8], rows)
    command = [sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang", "--base-url", base]
    command += ["--dataset-name", "custom", "--dataset-path", str(rows), "--num-prompts", "8"]
    command += ["--sharegpt-output-len", "48", "--max-concurrency", "2", "--output-file", str(result)]
    command += ["--model", "demo", "--tokenizer", TARGET, "--disable-tqdm"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    reported = json.loads(result.read_text().splitlines()[-1])["accept_length"]
    now = samples(base)
    tau = 1 + now["sglang_ddtree_accepted_drafts_sum"] / now["sglang_ddtree_accepted_drafts_count"]
    print(f"bench_serving {reported:.4f}, /metrics {tau:.4f}")
    return reported, tau
