"""Tokenizer, token streams and evaluation prompts, written into a work folder.

    python -m scripts.train_demo.data WORKDIR full

Runs without a GPU, beside the compilation of the kernels.
"""

from __future__ import annotations

import json
import os
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from scripts.train_demo.corpus import HELD_OUT, Source, collect
from scripts.train_demo.plan import Plan
from scripts.train_demo.report import say
from scripts.train_demo.shapes import END_OF_TEXT

END_OF_TEXT_TOKEN = "<|endoftext|>"
# Words with one leading non-letter, single digits, runs of punctuation, line ends, spaces: Qwen's split.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TOKENIZER_CHARS = 60_000_000


def train_tokenizer(texts: list[str], size: int) -> Tokenizer:
    """Byte-level BPE of `size` tokens; id 0 ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _encode(tokenizer_file: str, texts: list[str]) -> np.ndarray:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = Tokenizer.from_file(tokenizer_file)
    return np.concatenate(
        [np.array([*e.ids, END_OF_TEXT], dtype=np.int16) for e in tokenizer.encode_batch_fast(texts)]
    )


def encode(tokenizer_file: Path, texts: list[str], workers: int) -> np.ndarray:
    """int16 stream of all texts, each followed by the end of text."""
    batches = [texts[i : i + 128] for i in range(0, len(texts), 128)]
    work = partial(_encode, str(tokenizer_file))
    if workers == 1:
        return np.concatenate([work(b) for b in batches])
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return np.concatenate(list(pool.map(work, batches)))


def is_test(origin: str) -> bool:
    parts = origin.split("/")
    return "tests" in parts or "testing" in parts or parts[-1].startswith(("test_", "bench"))


def choose_prompts(
    sources: list[Source], tokenizer: Tokenizer, count: int, length: int, after: int
) -> list[dict]:
    """`count` prompts of `length` tokens, one per file, each beginning at a line and followed by `after` tokens.

    Tests are left out: they are long lists of similar assertions. A prompt's text encodes back to its tokens.
    """
    sources = [s for s in sources if not is_test(s.origin)]
    draw = random.Random(2026)
    draw.shuffle(sources)
    prompts = []
    for source in sources:
        lines = [0] + [i + 1 for i, c in enumerate(source.text) if c == "\n"]
        for start in draw.sample(lines, min(8, len(lines))):
            text = source.text[start : start + 8 * (length + after)]
            encoded = tokenizer.encode(text)
            if len(encoded.ids) < length + after:
                continue
            prompt = text[: encoded.offsets[length - 1][1]]
            if tokenizer.encode(prompt).ids == encoded.ids[:length]:
                following = text[len(prompt) : encoded.offsets[length + after - 1][1]]
                prompts.append({"origin": source.origin, "text": prompt, "following": following})
                break
        if len(prompts) == count:
            return prompts
    raise SystemExit(
        f"only {len(prompts)} of {count} evaluation prompts found; install the held-out packages: {', '.join(HELD_OUT)}"
    )


def prepare(folder: Path, plan: Plan) -> None:
    """Writes tokenizer.json, train.npy, heldout.npy, prompts.json and, last, data.json."""
    folder.mkdir(parents=True, exist_ok=True)
    workers = plan.data_workers
    sources, licences = collect(workers, limit=plan.file_limit)
    held = [s for s in sources if s.top in HELD_OUT]
    train = [s for s in sources if s.top not in HELD_OUT]
    draw = random.Random(0)
    draw.shuffle(train)
    draw.shuffle(held)
    size = {name: sum(len(s.text) for s in part) / 1e6 for name, part in (("train", train), ("held", held))}
    say(
        f"data: {len(train)} files of {size['train']:.0f} MB to train on, {len(held)} of {size['held']:.1f} MB held out"
    )

    sample, chars = [], 0
    for source in train:
        if chars > TOKENIZER_CHARS:
            break
        sample.append(source.text)
        chars += len(source.text)
    tokenizer = train_tokenizer(sample, plan.target.first_reserved)
    tokenizer.save(str(folder / "tokenizer.json"))
    say("data: tokenizer trained")
    prompts = choose_prompts(held, tokenizer, plan.prompts, plan.prompt_tokens, plan.new_tokens)
    (folder / "prompts.json").write_text(json.dumps(prompts))

    streams = {}
    for name, part in (("heldout", held), ("train", train)):
        streams[name] = encode(folder / "tokenizer.json", [s.text for s in part], workers)
        np.save(folder / f"{name}.npy", streams[name])
    megabytes: dict[str, float] = {}
    for s in sources:
        megabytes[s.top] = megabytes.get(s.top, 0) + len(s.text.encode()) / 1e6
    held_bytes = sum(len(s.text.encode()) for s in held)
    facts = {
        "train_files": len(train),
        "train_mb": sum(v for k, v in megabytes.items() if k not in HELD_OUT),
        "train_tokens": len(streams["train"]),
        "heldout_files": len(held),
        "heldout_tokens": len(streams["heldout"]),
        "heldout_bytes_per_token": held_bytes / len(streams["heldout"]),
        "packages": {
            top: {"mb": round(mb, 2), "licence": licences[top]}
            for top, mb in sorted(megabytes.items(), key=lambda item: -item[1])
        },
    }
    # The mark that this phase is done: whole or not there.
    (folder / "data.partial").write_text(json.dumps(facts, indent=1))
    (folder / "data.partial").replace(folder / "data.json")
    say(f"data: {facts['train_tokens'] / 1e6:.1f} M tokens to train on")


if __name__ == "__main__":
    prepare(Path(sys.argv[1]), Plan.named(sys.argv[2]))
