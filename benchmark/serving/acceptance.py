"""How many drafts a server accepts: from its /metrics, and from the figures in each response."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import requests
from prometheus_client.parser import text_string_to_metric_families

REQUESTS, TOKENS, STEPS = (
    "sglang:num_requests_total",
    "sglang:generation_tokens_total",
    "sglang:spec_verify_calls_total",
)
DDTREE_STEPS, DDTREE_ACCEPTED = "sglang_ddtree_accepted_drafts_count", "sglang_ddtree_accepted_drafts_sum"
SETTLE = 10  # seconds in which a finished request must appear in /metrics


@dataclass(frozen=True)
class Counts:
    """Since the server's start, over finished requests. steps: verify steps, of which plain decoding has none.

    accepted: accepted drafts; DDTREE counts them, for SGLang's own algorithms it is None.
    """

    requests: int
    tokens: int
    steps: int
    accepted: int | None

    def __sub__(self, other: Counts) -> Counts:
        accepted = None if self.accepted is None else self.accepted - (other.accepted or 0)
        return Counts(
            self.requests - other.requests, self.tokens - other.tokens, self.steps - other.steps, accepted
        )

    @property
    def decode_steps(self) -> int:
        """Target forwards that requests took part in after their prefill: one a token without speculation."""
        return self.steps or self.tokens - self.requests

    @property
    def tau(self) -> float:
        """Tokens delivered per request and step. The first token is prefill's; a last step is cut at the length."""
        return (self.tokens - self.requests) / max(1, self.decode_steps)


def read(text: str) -> Counts:
    """Counts from the text of /metrics."""
    wanted = (REQUESTS, TOKENS, STEPS, DDTREE_STEPS, DDTREE_ACCEPTED)
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in wanted:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    steps = int(sums.get(DDTREE_STEPS, sums.get(STEPS, 0)))
    accepted = int(sums[DDTREE_ACCEPTED]) if DDTREE_ACCEPTED in sums else None
    return Counts(int(sums.get(REQUESTS, 0)), int(sums.get(TOKENS, 0)), steps, accepted)


def counts(base: str, at_least: int = 0) -> Counts:
    """Counts of a running server once it has counted `at_least` requests. Raises TimeoutError."""
    end = time.monotonic() + SETTLE
    while True:
        answer = requests.get(base + "/metrics", timeout=30)
        answer.raise_for_status()
        found = read(answer.text)
        if found.requests >= at_least:
            return found
        if time.monotonic() > end:
            raise TimeoutError(
                f"/metrics counts {found.requests} of {at_least} requests; is --enable-metrics set?"
            )
        time.sleep(0.1)


@dataclass(frozen=True)
class Responses:
    """Sums over responses. histogram[i]: steps that accepted i drafts."""

    tokens: int
    requests: int
    steps: int
    accepted: int
    histogram: list[int]

    @property
    def tau(self) -> float:
        return (self.tokens - self.requests) / max(1, self.steps or self.tokens - self.requests)


def generate(base: str, texts: list[str], temperature: float, tokens: int, concurrency: int) -> Responses:
    """Sends every text to /generate, `concurrency` at a time, and adds up what the responses say of themselves."""

    def one(text: str) -> dict:
        params = dict(temperature=temperature, max_new_tokens=tokens, ignore_eos=True)
        answer = requests.post(base + "/generate", json=dict(text=text, sampling_params=params), timeout=600)
        answer.raise_for_status()
        return answer.json()["meta_info"]

    with ThreadPoolExecutor(concurrency) as pool:
        return add_up(pool.map(one, texts))


def add_up(metas: Iterator[dict]) -> Responses:
    """metas: `meta_info` of each response."""
    tokens = number = steps = accepted = 0
    histogram: list[int] = []
    for meta in metas:
        number += 1
        tokens += meta["completion_tokens"]
        steps += meta.get("spec_verify_ct", 0)
        accepted += meta.get("spec_num_correct_drafts", 0)
        found = meta.get("spec_accept_histogram") or []
        histogram += [0] * (len(found) - len(histogram))
        for i, n in enumerate(found):
            histogram[i] += n
    return Responses(tokens, number, steps, accepted, histogram)


def disagreement(seen: Counts, told: Responses) -> str | None:
    """One line where /metrics and the responses of the same requests differ; None where they agree."""
    pairs = [("requests", seen.requests, told.requests), ("tokens", seen.tokens, told.tokens)]
    pairs.append(("steps", seen.steps, told.steps))
    if seen.accepted is not None:
        pairs.append(("accepted drafts", seen.accepted, told.accepted))
    wrong = [f"{name} {a} in /metrics, {b} in the responses" for name, a, b in pairs if a != b]
    return "; ".join(wrong) or None
