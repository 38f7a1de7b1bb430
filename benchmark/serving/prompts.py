"""Prompts of a load: the held-out code that neither demo model was trained on, or a file of one's own."""

from __future__ import annotations

import json
from pathlib import Path

from sglang_ddtree.operate.load import read_prompts
from sglang_ddtree.operate.unit import OperateError

HELDOUT = Path(__file__).resolve().parents[2] / "models/heldout_prompts.json"


class UsageError(Exception):
    """A flag that cannot be served: one line that names it and the remedy."""


def heldout_prompts() -> list[str]:
    """The 64 prompts of models/heldout_prompts.json."""
    return [p["text"] for p in json.loads(HELDOUT.read_text())["prompts"]]


def read_rows(path: Path | None) -> list[dict]:
    """Rows {"prompt": text} or {"messages": [...]}; without a path the held-out code. Raises UsageError."""
    if path is None:
        return [dict(prompt=text) for text in heldout_prompts()]
    try:
        return read_prompts(path)
    except OperateError as e:
        raise UsageError(str(e)) from None


def texts(rows: list[dict], tokenizer: str) -> list[str]:
    """The rows as the model sees them: messages go through the chat template of the tokenizer's folder."""
    if all("prompt" in row for row in rows):
        return [row["prompt"] for row in rows]
    from transformers import AutoTokenizer

    template = AutoTokenizer.from_pretrained(tokenizer).apply_chat_template
    return [
        row["prompt"]
        if "prompt" in row
        else template(row["messages"], add_generation_prompt=True, tokenize=False)
        for row in rows
    ]


def write_custom_dataset(prompts: list[str], path: Path) -> None:
    """The `custom` format of sglang.bench_serving 0.5.17: two turns a line, of which the first is the prompt."""
    with path.open("w") as f:
        for prompt in prompts:
            turns = [dict(role="user", content=prompt), dict(role="assistant", content="-")]
            f.write(json.dumps(dict(conversations=turns)) + "\n")
