"""What DDTREE counts while it serves, for /metrics, /server_info and each response's meta_info.

Acceptance is read where SGLang has it on the host anyway, when it processes a step's results; the worker only marks its
phases, and one step of every SAMPLE is timed without waiting for the device. A request that finished while its next
step was already under way (overlap scheduling) is not counted for that step, as in SGLang's own per-request figures.

tau, tokens per request and step, is 1 + rate(..._accepted_drafts_sum) / rate(..._accepted_drafts_count).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from sglang_ddtree.server_args import is_ddtree

if TYPE_CHECKING:
    from sglang_ddtree.server_args import DDTreeServerArgs

SAMPLE = 16
MAX_ACCEPTED = 15  # the last finite bucket; drafters of longer blocks fall into +Inf
SECONDS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024)


class Exporter:
    """The Prometheus side. Created in the scheduler process, after SGLang has chosen its multiprocess directory."""

    def __init__(self, labels: dict[str, object], budget: int, cap: int):
        from prometheus_client import Counter, Gauge, Histogram

        names, prefix = list(labels), "sglang_ddtree_"
        self.labels = labels
        self.accepted = Histogram(
            prefix + "accepted_drafts",
            "Accepted draft tokens of one request in one verify step; tau is 1 + sum / count.",
            names,
            buckets=range(MAX_ACCEPTED + 1),
        ).labels(**labels)
        self.rows = Counter(
            prefix + "tree_rows", "Rows of verified trees that were nodes, the root included.", names
        ).labels(**labels)
        self.forwards = Counter(
            prefix + "verify_forwards", "Verify forwards; each serves every running request.", names
        ).labels(**labels)
        self.phases = Histogram(
            prefix + "phase_seconds",
            f"Seconds of the phases draft, verify and commit of a step, one step of {SAMPLE} sampled.",
            [*names, "phase"],
            buckets=SECONDS,
        )
        for name, value in (("budget", budget), ("topk_cap", cap)):
            gauge = Gauge(
                prefix + name,
                f"--speculative-ddtree-{name.replace('_', '-')} of the server.",
                names,
                multiprocess_mode="mostrecent",
            )
            gauge.labels(**labels).set(value)

    def step(self, accepted: list[int], rows: int) -> None:
        for count in accepted:
            self.accepted.observe(count)
        self.rows.inc(rows * len(accepted))
        self.forwards.inc()

    def phase(self, name: str, seconds: float) -> None:
        self.phases.labels(**self.labels, phase=name).observe(seconds)


class Recorder:
    """Counts of this process since its start. exporter: None where --enable-metrics is off or another rank reports."""

    def __init__(self):
        self.steps = self.forwards = self.rows = 0
        self.histogram: list[int] = []
        self.exporter: Exporter | None = None

    def step(self, accepted: list[int], rows: int) -> None:
        """One verify forward. accepted: drafts accepted per live request; rows: nodes of each tree with its root."""
        self.steps += len(accepted)
        self.forwards += 1
        self.rows += rows * len(accepted)
        for count in accepted:
            self.histogram.extend([0] * (count + 1 - len(self.histogram)))
            self.histogram[count] += 1
        if self.exporter is not None:
            self.exporter.step(accepted, rows)

    def state(self) -> dict[str, object]:
        """For /server_info: the counts, and tau where there was a step."""
        accepted = sum(i * n for i, n in enumerate(self.histogram))
        state = dict(
            steps=self.steps,
            accepted_drafts=accepted,
            accepted_drafts_histogram=list(self.histogram),
            tree_rows=self.rows,
            verify_forwards=self.forwards,
        )
        return state | ({"tau": 1 + accepted / self.steps} if self.steps else {})


RECORDER = Recorder()


class PhaseTimer:
    """Seconds of a step's phases. On CUDA between two events that are read some steps later, so nothing waits."""

    def __init__(self, device: str | torch.device, recorder: Recorder = RECORDER):
        self.cuda = torch.device(device).type == "cuda"
        self.recorder = recorder
        self.count, self.sampling = 0, False
        self.pending: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def begin_step(self) -> None:
        """Call at the start of a step: decides whether it is sampled, and collects what the device has finished."""
        self.sampling = self.recorder.exporter is not None and self.count % SAMPLE == 0
        self.count += 1
        while self.pending and self.pending[0][2].query():
            name, start, end = self.pending.pop(0)
            if self.recorder.exporter is not None:
                self.recorder.exporter.phase(name, start.elapsed_time(end) / 1000)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """name: draft, verify or commit."""
        if not self.sampling:
            yield
        elif self.cuda:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self.pending.append((name, start, end))
        else:
            started = time.perf_counter()
            yield
            self.recorder.exporter.phase(name, time.perf_counter() - started)


def tree_rows(args: DDTreeServerArgs) -> int:
    """Nodes of a tree with its root: the budget, or all the paths that cap and block allow where those are fewer."""
    nodes, width = 0, 1
    for _ in range(args.speculative_dflash_block_size - 1):
        width *= args.speculative_ddtree_topk_cap
        nodes += width
        if nodes >= args.speculative_ddtree_budget:
            return args.speculative_ddtree_budget + 1
    return nodes + 1


def resolve_tokens(original, processor, result, batch):
    """Hook around the place where the scheduler learns what a step accepted."""
    args = processor.server_args
    if not is_ddtree(args):
        return original(processor, result, batch)
    live = [not (req.is_retracted or req.finished()) for req in batch.reqs]
    tokens = original(processor, result, batch)
    counts = result.num_correct_drafts_per_req_cpu
    if RECORDER.exporter is None and processor.metrics_reporter.current_scheduler_metrics_enabled:
        RECORDER.exporter = Exporter(
            processor.metrics_collector.labels,
            args.speculative_ddtree_budget,
            args.speculative_ddtree_topk_cap,
        )
    RECORDER.step([n for n, is_live in zip(counts, live, strict=True) if is_live], tree_rows(args))
    return tokens


def internal_state(answer, scheduler, _request):
    """Hook after /server_info: the counts, and SGLang's figure for load tools made of them.

    SGLang's own is brought up to date every few dozen steps only and counts finished requests once more.
    """
    if is_ddtree(scheduler.server_args) and RECORDER.steps:
        state = RECORDER.state()
        answer.internal_state |= {"ddtree": state, "avg_spec_accept_length": state["tau"]}
    return answer


def request_metrics(_none, manager, meta_info, recv_obj, i) -> None:
    """Hook after SGLang's per-request figures: it takes the reserved width for the number of proposed drafts, which is
    more than the budget where that is below the drafter's block."""
    args = manager.server_args
    if not is_ddtree(args) or "spec_num_proposed_drafts" not in meta_info:
        return
    proposed = meta_info["spec_verify_ct"] * args.speculative_ddtree_budget
    meta_info["spec_num_proposed_drafts"] = meta_info["spec_proposed_drafts"] = proposed
    meta_info["spec_accept_rate"] = meta_info["spec_num_correct_drafts"] / proposed
