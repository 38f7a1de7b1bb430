"""The two clients of a sweep: SGLang's own bench_serving, and plain streams of the `openai` package."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from sglang_ddtree.operate import streams

from benchmark.serving.grids import Load
from benchmark.serving.prompts import write_custom_dataset

ROOT = Path(__file__).resolve().parents[2]
# Of bench_serving's output: what a figure is made of. Its copy of all server settings and the texts stay out.
KEPT = (
    *("backend", "dataset_name", "max_concurrency", "sharegpt_output_len"),
    *("duration", "completed", "total_input_tokens", "total_output_tokens", "output_throughput"),
    *("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "median_itl_ms", "p99_itl_ms", "concurrency"),
    *("accept_length", "input_lens", "output_lens", "ttfts", "itls", "errors"),
)


class LoadError(Exception):
    """A load tool that failed: one line."""


@dataclass(frozen=True)
class Repetition:
    """One load, run once. seconds: from the first request to the last answer.

    decode_s: summed over requests, from each one's first token to its last. gaps_ms: milliseconds per token after the
    first, of all requests; tokens that arrive together share the time since the ones before.
    """

    tokens: int
    requests: int
    seconds: float
    decode_s: float
    ttft_ms: float
    gaps_ms: list[float]

    @property
    def tok_s(self) -> float:
        return self.tokens / self.seconds


def read_bench(row: dict) -> Repetition:
    """One line of `bench_serving --output-details`. Raises LoadError where a request failed."""
    failed = [e for e in row["errors"] if e]
    if failed or row["completed"] != len(row["output_lens"]):
        reason = failed[0].strip().splitlines()[-1] if failed else "no reason given"
        raise LoadError(
            f"bench_serving: {len(row['output_lens']) - row['completed']} requests failed: {reason}"
        )
    return Repetition(
        tokens=sum(row["output_lens"]),
        requests=row["completed"],
        seconds=row["duration"],
        decode_s=sum(map(sum, row["itls"])),
        ttft_ms=row["median_ttft_ms"],
        gaps_ms=[1e3 * gap for gaps in row["itls"] for gap in gaps],
    )


class BenchServing:
    """Runs bench_serving. folder: for its files; raw: every line of its output, shortened to KEPT, is added there."""

    def __init__(self, tokenizer: str, folder: Path, raw: Path):
        self.tokenizer, self.folder, self.raw = tokenizer, folder, raw
        self.log = (folder / "bench_serving.log").open("w")
        self.process: subprocess.Popen | None = None

    def arguments(self, base: str, model: str, load: Load, prompts: Path, output: Path) -> list[str]:
        found = ["--backend", "sglang", "--base-url", base, "--served-model-name", model]
        found += [
            "--model",
            self.tokenizer,
            "--tokenizer",
            self.tokenizer,
        ]  # it looks for a chat template there
        found += ["--dataset-name", "custom", "--dataset-path", str(prompts)]
        found += ["--num-prompts", str(load.requests), "--sharegpt-output-len", str(load.tokens)]
        found += ["--max-concurrency", str(load.concurrency), "--temperature", str(load.temperature)]
        # The warm-up was ours: as many requests at a time as are measured, where this tool's would be one.
        return [*found, "--warmup-requests", "0", "--output-details", "--output-file", str(output)]

    def __call__(self, base: str, model: str, load: Load, texts: list[str]) -> Repetition:
        """Sends each of the texts once. Raises LoadError."""
        prompts, output = self.folder / "prompts.jsonl", self.folder / "bench_serving.jsonl"
        write_custom_dataset(texts, prompts)
        output.unlink(missing_ok=True)
        self._run([*self.arguments(base, model, load, prompts, output), "--disable-tqdm"])
        row = {k: v for k, v in json.loads(output.read_text().splitlines()[-1]).items() if k in KEPT}
        with self.raw.open("a") as f:
            f.write(json.dumps(row) + "\n")
        return read_bench(row)

    def start(self) -> None:
        """Imports the tool, which takes seconds, so that whatever keeps it from running shows before any server starts.

        Raises LoadError.
        """
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmark.serving.bench_client"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
        self._answer()

    def _run(self, arguments: list[str]) -> None:
        if self.process is None:
            self.start()
        try:
            self.process.stdin.write(json.dumps(arguments) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, which its answer will say
        self._answer()

    def _answer(self) -> None:
        line = self.process.stdout.readline()
        if not line:
            status, self.process = self.process.wait(), None
            said = Path(self.log.name).read_text(errors="replace").strip().splitlines() or ["it said nothing"]
            raise LoadError(f"bench_serving ended with status {status}: {said[-1][:300]}")
        answer = json.loads(line)
        if answer["status"]:
            raise LoadError(f"bench_serving: {answer['error']}")

    def close(self) -> None:
        if self.process is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()  # its loop over lines ends
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:  # it was interrupted in the middle of a load
                self.process.kill()
                self.process.wait()
        self.log.close()


def openai_client(base: str, model: str, load: Load, texts: list[str]) -> Repetition:
    """Each of the texts once, from the `openai` package. Raises openai.APIError."""
    rows = [dict(prompt=text) for text in texts]
    answers, seconds = streams.send(
        base, rows, load.requests, load.concurrency, load.tokens, load.temperature, model, ignore_eos=True
    )
    return Repetition(
        tokens=sum(a.tokens for a in answers),
        requests=len(answers),
        seconds=seconds,
        decode_s=sum(a.last_s - a.first_s for a in answers),
        ttft_ms=1e3 * statistics.median(a.first_s for a in answers),
        gaps_ms=[gap for a in answers for gap in a.gaps_ms()],
    )
