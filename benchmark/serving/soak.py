"""A mixed load for minutes or hours against a running server, then the check that nothing leaked.

    python benchmark/serving/soak.py --base-url http://127.0.0.1:30000 --minutes 30 --concurrency 6

Chats of several turns (prefix cache), long and short prompts, streams that hang up half-way, temperatures, penalties,
JSON schemas, seeds and log-probs, drawn at random. One line a minute; at the end every request must be accounted for,
and after a flush of the prefix cache no KV slot, GDN slot or request may be left. The server needs --enable-metrics.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Annotated

import httpx
import openai
import typer
from prometheus_client.parser import text_string_to_metric_families

OPENINGS = (
    "def fibonacci(n):\n    ",
    "import numpy as np\n\n\nclass Matrix:\n    def __init__(self, rows, cols",
    "class Stack:\n    def __init__(self):\n        self._items = []\n\n    def push(self, item):\n",
    "for i in range(10):\n    if i % 2 == 0:\n        print(",
)
SCHEMA = dict(type="object", properties=dict(name=dict(type="string", maxLength=12)), required=["name"])
GAUGES = ("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:num_used_tokens", "sglang:mamba_usage")


@dataclass
class Load:
    client: openai.AsyncOpenAI
    model: str
    draw: random.Random
    ends: float
    counts: Counter = field(default_factory=Counter)
    tokens: int = 0

    def prompt(self) -> str:
        opening = self.draw.choice(OPENINGS)
        return "# " + "x = y + 1\n" * self.draw.choice((0, 0, 0, 5, 40, 150)) + opening

    def options(self) -> dict:
        d = self.draw
        options = dict(
            max_tokens=d.choice((1, 8, 32, 96, 200)), temperature=d.choice((0, 0, 0.7, 1.0)), extra_body={}
        )
        kind = d.randrange(6)
        if kind == 0:
            options |= dict(frequency_penalty=0.5, presence_penalty=0.3)
        elif kind == 1:
            options["seed"] = d.randrange(1000)
        elif kind == 2:
            options["logprobs"] = 2
        elif kind == 3:
            options["extra_body"] = dict(json_schema=json.dumps(SCHEMA))
        return options

    async def worker(self) -> None:
        while time.monotonic() < self.ends:
            text = self.prompt()
            for _ in range(self.draw.choice((1, 1, 3))):  # turns of one conversation
                try:
                    text += await self.turn(text)
                except openai.APIError as e:
                    self.counts[f"error: {e}"[:120]] += 1

    async def turn(self, text: str) -> str:
        request = dict(model=self.model, prompt=text[-6000:], **self.options())
        if self.draw.random() < 0.5:
            answer = await self.client.completions.create(**request)
            self.tokens += answer.usage.completion_tokens
            self.counts["answered"] += 1
            return answer.choices[0].text
        leave_after = self.draw.choice((None, None, None, 1, 5))
        stream, parts = await self.client.completions.create(stream=True, **request), []
        async with stream:
            async for chunk in stream:
                parts += [choice.text for choice in chunk.choices]
                if leave_after is not None and len(parts) >= leave_after:
                    self.counts["hung up"] += 1
                    return "".join(parts)
        self.tokens += len(parts)  # chunks: a step's tokens come together
        self.counts["streamed"] += 1
        return "".join(parts)


async def gauges(base_url: str) -> dict[str, float]:
    async with httpx.AsyncClient(base_url=base_url, timeout=60) as http:
        text = (await http.get("/metrics")).text
    found = dict.fromkeys(GAUGES, 0.0)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in found:
                found[sample.name] += sample.value
    return found


async def left_behind(base_url: str) -> dict[str, float]:
    """What the gauges still show once the server is idle and its prefix cache empty."""
    async with httpx.AsyncClient(base_url=base_url, timeout=60) as http:
        for _ in range(30):
            if (await http.post("/flush_cache")).status_code == 200:
                break
            await asyncio.sleep(1)
        # Gauges are written with the next batch, which this request makes.
        await http.post("/generate", json=dict(input_ids=[5], sampling_params=dict(max_new_tokens=1)))
        await asyncio.sleep(2)
        await http.post("/flush_cache")
    return {name: value for name, value in (await gauges(base_url)).items() if value > 0}


async def soak(base_url: str, minutes: float, concurrency: int, seed: int) -> bool:
    client = openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none", timeout=300, max_retries=0)
    model = (await client.models.list()).data[0].id
    ends = time.monotonic() + 60 * minutes
    load = Load(client, model, random.Random(seed), ends)
    tasks = [asyncio.create_task(load.worker()) for _ in range(concurrency)]
    minute, rates = 0, []
    while not all(task.done() for task in tasks):
        before, started = load.tokens, time.monotonic()
        await asyncio.wait(tasks, timeout=60)
        minute += 1
        seconds = time.monotonic() - started
        if seconds > 30:
            rates.append((load.tokens - before) / seconds)
        seen = await gauges(base_url)
        state = ", ".join(f"{name.removeprefix('sglang:')} {value:g}" for name, value in seen.items())
        print(f"minute {minute}: {(load.tokens - before) / seconds:.0f} tok/s; {state}", flush=True)
    for task in tasks:
        task.result()
    errors = sum(n for what, n in load.counts.items() if what.startswith("error"))
    left = await left_behind(base_url)
    half = len(rates) // 2
    if half:
        first, second = sum(rates[:half]) / half, sum(rates[half:]) / (len(rates) - half)
        print(f"throughput: {first:.0f} tok/s in the first half, {second:.0f} in the second")
    print(f"requests: {dict(load.counts)}; left behind: {left or 'nothing'}")
    return not errors and not left


def main(
    base_url: str = "http://127.0.0.1:30000",
    minutes: Annotated[float, typer.Option(min=0.1, max=600)] = 30,
    concurrency: Annotated[int, typer.Option(min=1, max=256)] = 6,
    seed: int = 0,
):
    sys.exit(not asyncio.run(soak(base_url, minutes, concurrency, seed)))


if __name__ == "__main__":
    typer.run(main)
