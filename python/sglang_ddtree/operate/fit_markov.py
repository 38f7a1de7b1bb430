"""`fit-markov`: bigram factors from texts or from the target's own output, and what they are worth with a drafter."""

from __future__ import annotations

import glob
import itertools
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress, track
from rich.table import Table

from sglang_ddtree.operate import load
from sglang_ddtree.operate.sweep import whole_numbers
from sglang_ddtree.operate.terminal import console, refuse
from sglang_ddtree.operate.unit import OperateError

TEXTS_AT_ONCE, REQUESTS_AT_ONCE = 64, 64
GENERATED, TEMPERATURE = 512, 0.8  # most tokens of one text from the target, and how it is sampled
HELD_OUT, MEASURED = 16, 128  # prompts that tau is measured on, and tokens of each
TEMPERATURES = (0.0, 0.7)
progress = Console(stderr=True)
CPU_FLAGS = (
    "--device cpu --dtype float32 --max-running-requests 8 --max-total-tokens 65536 --max-mamba-cache-size 96"
)


@dataclass(frozen=True)
class Target:
    """A model's folder or name, and the SGLang flags it is run with."""

    model: str
    flags: tuple[str, ...]

    def vocab_size(self) -> int:
        """Raises OperateError where there is no such model."""
        from sglang.srt.utils.hf_transformers_utils import get_config

        try:
            config = get_config(self.model, trust_remote_code="--trust-remote-code" in self.flags)
        except Exception as e:
            reason = str(e).strip().splitlines()[0]
            raise OperateError(f"--model {self.model}: {reason}; name a target's folder") from None
        return config.get_text_config().vocab_size

    def tokenizer(self):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(
            self.model, trust_remote_code="--trust-remote-code" in self.flags
        )
        tokenizer.model_max_length = int(1e9)  # files are counted whole
        return tokenizer

    @contextmanager
    def engine(self, *flags: str) -> Iterator:
        """sglang.Engine with flags behind the target's own. Raises OperateError on flags that SGLang refuses."""
        from sglang.srt.plugins import load_plugins

        load_plugins()
        from sglang import Engine
        from sglang.srt.server_args import prepare_server_args

        from sglang_ddtree import hooks

        base = ["--model-path", self.model, "--log-level", "error"]
        base += CPU_FLAGS.split() if hooks.on_cpu() else []
        try:
            args = prepare_server_args([*base, *self.flags, *flags])
        except SystemExit:
            raise OperateError("SGLang refuses these flags; its reason stands above") from None
        running = Engine(server_args=args)
        try:
            yield running
        finally:
            running.shutdown()


def read_texts(patterns: list[str], tokenizer) -> Iterator[np.ndarray]:
    """Token ids of every file that the patterns match, in the order of their names. Raises OperateError."""
    paths = []
    for pattern in patterns:
        found = sorted(p for p in glob.glob(pattern, recursive=True) if Path(p).is_file())
        if not found:
            raise OperateError(
                f"--texts {pattern}: no such file; give text files, or a quoted pattern such as '**/*.py'"
            )
        paths += found
    chunks = [paths[i : i + TEXTS_AT_ONCE] for i in range(0, len(paths), TEXTS_AT_ONCE)]
    for chunk in track(chunks, f"{len(paths)} files", console=progress):
        texts = [Path(p).read_text(errors="replace") for p in chunk]
        for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]:
            yield np.asarray(ids, dtype=np.int64)


def prompt_ids(prompts: list[dict], tokenizer) -> list[list[int]]:
    """Token ids of {"prompt": ...} or {"messages": [...]} rows, the latter in the model's chat template."""
    return [
        tokenizer.encode(row["prompt"])
        if "prompt" in row
        else tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=False)
        for row in prompts
    ]


def generate(target: Target, prompts: list[list[int]], tokens: int, seed: int) -> Iterator[np.ndarray]:
    """At least `tokens` tokens of the target's own output, prompts taken in turn."""
    turns, left = itertools.cycle(prompts), tokens
    sampling = dict(temperature=TEMPERATURE, max_new_tokens=GENERATED)
    with target.engine("--random-seed", str(seed)) as running, Progress(console=progress) as bars:
        bar = bars.add_task("tokens from the target", total=tokens)
        while left > 0:
            number = min(REQUESTS_AT_ONCE, -(-left // GENERATED))
            batch = list(itertools.islice(turns, number))
            for out in running.generate(input_ids=batch, sampling_params=sampling):
                ids = np.asarray(out["output_ids"], dtype=np.int64)
                left -= len(ids)
                bars.advance(bar, len(ids))
                yield ids


def write(
    out: Path, sequences: Iterable[np.ndarray], vocab_size: int, rank: int, alpha: float, seed: int
) -> str:
    """Counts, factorises, saves; says of what. Raises OperateError where there is nothing to count."""
    import torch

    from sglang_ddtree.draft import markov
    from sglang_ddtree.operate import bigrams

    counts = bigrams.count(sequences, vocab_size)
    tokens = int(counts.sum())
    if not tokens:
        raise OperateError("nothing to count: no text has two tokens")
    left, right = map(torch.from_numpy, bigrams.factorise(counts, rank, alpha, seed))
    markov.save(out, left, right, dict(rank=rank, pairs=tokens, alpha=alpha, seed=seed))
    return f"rank {rank} from {tokens} pairs, {counts.nnz} of them different, {out.stat().st_size / 2**20:.1f} MiB"


def measure(
    target: Target, draft: str, factors: str, budget: int, prompts: list[list[int]], seed: int
) -> list[float]:
    """tau at each of TEMPERATURES, of an engine that serves the pair."""
    flags = ["--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", draft]
    flags += ["--speculative-ddtree-budget", str(budget), "--speculative-ddtree-markov", factors]
    taus = []
    with target.engine(*flags, "--random-seed", str(seed)) as running:
        for temperature in TEMPERATURES:
            sampling = dict(temperature=temperature, max_new_tokens=MEASURED)
            outputs = [o["meta_info"] for o in running.generate(input_ids=prompts, sampling_params=sampling)]
            steps = sum(o["spec_verify_ct"] for o in outputs)
            taus.append(sum(o["completion_tokens"] - 1 for o in outputs) / max(steps, 1))
    return taus


def tau_table(target: Target, draft: str, file: Path, budgets: list[int], prompts, seed: int) -> Table:
    """tau with and without the factors, by budget and temperature; an engine for each cell of a row."""
    table = Table(title=f"tau, {len(prompts)} prompts x {MEASURED} tokens")
    for column in ("temperature", "budget", "without", "with", "ratio"):
        table.add_column(column, justify="right")
    rows = []
    for budget in track(budgets, "budgets", console=progress):
        without, with_ = (measure(target, draft, f, budget, prompts, seed) for f in ("off", str(file)))
        rows += zip(TEMPERATURES, [budget] * len(TEMPERATURES), without, with_, strict=True)
    for temperature, budget, a, b in sorted(rows):
        table.add_row(f"{temperature:g}", str(budget), f"{a:.2f}", f"{b:.2f}", f"{b / a:.3f}")
    return table


def fit_markov(
    model: Annotated[str, typer.Option(help="the target: its folder, or its name on the hub")],
    out: Annotated[
        Path, typer.Option(help="file to write; beside a drafter's weights it is found: markov.safetensors")
    ],
    texts: Annotated[
        list[str] | None,
        typer.Option(help="text file, or quoted pattern; may be repeated. Best: your own traffic"),
    ] = None,
    from_target: Annotated[
        int | None, typer.Option(min=1, help="count so many tokens that the target generates from --prompts")
    ] = None,
    rank: Annotated[
        int, typer.Option(min=1, max=256, help="the file takes 4 bytes a rank and token of the vocabulary")
    ] = 64,
    alpha: Annotated[
        float, typer.Option(min=1e-3, help="smoothing: so many tokens of unigram to each row")
    ] = 20.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    draft: Annotated[str | None, typer.Option(help="its drafter: also measure tau with and without")] = None,
    budgets: Annotated[str, typer.Option(help="of that measurement, separated by commas")] = "15,31,63",
    prompts: Annotated[
        Path,
        typer.Option(help='JSON lines, {"prompt": ...} or {"messages": [...]}; some are held out for tau'),
    ] = load.PROMPTS,
    flags: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- SGLANG_FLAGS]", help="of the target's engine: --tp-size 4 ..."),
    ] = None,
) -> None:
    """Fit the bigram factors with which DDTREE orders children by their parent, and write them to a file."""
    started = time.perf_counter()
    target = Target(model, tuple(flags or ()))
    try:
        if bool(texts) == (from_target is not None):
            raise OperateError("give either --texts or --from-target")
        if not out.parent.is_dir():
            raise OperateError(f"--out {out}: no folder {out.parent}; make it first")
        sizes = whole_numbers("--budgets", budgets)
        rows = load.read_prompts(prompts)
        number = HELD_OUT if texts else min(HELD_OUT, len(rows) // 4)
        vocab_size = target.vocab_size()
        if rank > vocab_size:
            raise OperateError(f"--rank {rank}: above the vocabulary's {vocab_size}; use at most that")
        tokenizer = target.tokenizer()
        ids = prompt_ids(rows, tokenizer)
        sequences = (
            read_texts(texts, tokenizer)
            if from_target is None
            else generate(target, ids[number:], from_target, seed)
        )
        done = write(out, sequences, vocab_size, rank, alpha, seed)
        console.print(f"{out}: {done}, after {time.perf_counter() - started:.0f} s")
        if draft is not None:
            console.print(tau_table(target, draft, out, sizes, ids[:number], seed))
    except OperateError as e:
        raise refuse(e) from None
