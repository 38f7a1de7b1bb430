"""One JSON line per measured load, with everything needed to say what it is a figure of."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, fields
from pathlib import Path

# Two runs are the same measurement if they agree in these; a second one is not made.
IDENTITY = (
    *("commit", "hardware", "target", "draft", "flags", "prompts"),
    *(
        "method",
        "budget",
        "cap",
        "tp",
        "client",
        "temperature",
        "concurrency",
        "requests",
        "tokens",
        "repeats",
    ),
)


class RecordError(Exception):
    """A file of runs that cannot be read: one line with file, line number and remedy."""


@dataclass(frozen=True)
class Run:
    """flags: SGLang's, for this server, without its address; prompts: the file they are from. Figures are medians over
    the repetitions.

    tok_s: output tokens per second of all requests together, prefill included. step_ms: from first to last token of
    every request, over its steps. tau: tokens delivered per request and step, the repetitions' from /metrics;
    tau_responses: the warm-up's, from the responses. agree: /metrics and the responses of the warm-up told the same
    counts. histogram[i]: steps of the warm-up that accepted i drafts. itl_ms: milliseconds per token after the first,
    median and p99. load_average: processes that wanted a core over the minute before the repetitions; where that is
    more than a server and its client need, the machine had other work and times are not to be trusted.
    """

    commit: str
    hardware: str
    target: str
    draft: str
    flags: list[str]
    prompts: str
    method: str
    budget: int | None
    cap: int | None
    tp: int
    client: str
    temperature: float
    concurrency: int
    requests: int
    tokens: int
    repeats: int
    rows: int
    when: str
    versions: dict[str, str]
    warm_up_requests: int
    start_s: float
    tok_s: float
    tok_s_each: list[float]
    step_ms: float
    step_ms_each: list[float]
    tau: float
    tau_responses: float
    agree: bool
    histogram: list[int]
    ttft_ms: float
    itl_ms: dict[str, float]
    memory: dict[str, float]
    load_average: float

    def key(self) -> str:
        return key(**{name: getattr(self, name) for name in IDENTITY})


def key(**identity) -> str:
    """One string for the fields named in IDENTITY, all of which must be given."""
    return json.dumps([identity[name] for name in IDENTITY])


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least `share` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def median_and_p99(values: list[float]) -> dict[str, float]:
    return dict(median=statistics.median(values), p99=percentile(values, 0.99))


def read(path: Path) -> list[Run]:
    """All runs of a file, in its order; none where it does not exist. Raises RecordError."""
    if not path.exists():
        return []
    runs = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            runs.append(Run(**{f.name: row[f.name] for f in fields(Run)}))
        except (json.JSONDecodeError, KeyError, TypeError) as e:
            raise RecordError(
                f"{path}, line {number}: not a run of this sweep ({e}); remove that line or name another file"
            ) from None
    return runs


def append(path: Path, run: Run) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as f:
        f.write(json.dumps(_rounded(asdict(run))) + "\n")


def _rounded(value):
    """Six digits are more than any of these measurements has."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    return value
