"""A server under measurement: started with the flags of one method, waited for, drained, and never left behind."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import requests

from benchmark.serving.grids import CHAIN, LEAKY, PLAIN, Start
from benchmark.serving.machine import cpu_threads, gpus

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT, STOP_LIMIT, KILL_LIMIT = 900, 150, 20  # seconds; STOP_LIMIT exceeds the drain's own limit of 120
SERVED_NAME, RECIPE = "measured", "widen.json"  # the latter: of `python -m benchmark.widen`
BUFFERS = re.compile(r"buffers of ([\d.]+) GiB for (\d+) requests, ([\d.]+) MiB a row")


class ServerError(Exception):
    """A server that does not start: one line, its own last words where it said any."""


@dataclass(frozen=True)
class Pair:
    """Folders of target and drafter, and whatever SGLang flags this pair or machine needs beside."""

    target: str
    draft: str
    flags: tuple[str, ...] = ()


def arguments(start: Start, pair: Pair, on_gpu: bool, streams: int) -> list[str]:
    """SGLang's flags for one start, without host and port. streams: the most requests that will run at a time.

    Every method gets the same flags but for its own. The prefix cache is off: a prompt sent again is prefilled again.
    """
    found = ["--model-path", pair.target, "--served-model-name", SERVED_NAME, "--tp-size", str(start.tp)]
    found += ["--enable-metrics", "--disable-radix-cache", "--max-running-requests", str(streams)]
    if on_gpu:
        found += ["--attention-backend", "triton"]
    else:
        found += ["--device", "cpu", "--dtype", "float32", "--sleep-on-idle"]
        found += ["--max-total-tokens", "32768", "--max-mamba-cache-size", str(10 * streams)]
    if start.method == CHAIN and on_gpu:
        found += ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", pair.draft]
    elif start.method != PLAIN:
        found += ["--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", pair.draft]
        found += ["--speculative-ddtree-budget", str(start.budget)]
        found += ["--speculative-ddtree-topk-cap", str(start.cap)]
        if start.method == CHAIN:  # stock DFLASH refuses a CPU; a tree of cap 1 is the drafter's argmax chain
            found += ["--speculative-ddtree-markov", "off"]
    return [*found, *pair.flags]


def command(pair: Pair, gate: Path) -> list[str]:
    """`sglang serve` behind a gate; folders without weights have a server of their own, which makes them."""
    widened = ["--widened"] if (Path(pair.target) / RECIPE).exists() else []
    return [sys.executable, "-m", "benchmark.serving.gated", "--gate", str(gate), *widened, "--"]


def free_port() -> int:
    """Below those that the system gives to clients: the server may take it minutes later."""
    while True:
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", random.randrange(20_000, 30_000)))
            return s.getsockname()[1]


class Server:
    """One `sglang serve` in a session of its own, whose processes import SGLang and wait for `go`.

    log: its output; the gate is a file beside it. start_s: seconds from `go` until /health answered 200.
    """

    def __init__(self, start: Start, pair: Pair, streams: int, log: Path):
        self.on_gpu, self.log, self.gate = bool(gpus()), log, log.with_suffix(".gate")
        self.flags = arguments(start, pair, self.on_gpu, streams)
        port = free_port()
        self.base = f"http://127.0.0.1:{port}"  # where it serves, once it does
        environment = {k: v for k, v in os.environ.items() if k != "SGLANG_DDTREE_LEAKY"}
        environment.setdefault("HF_HUB_OFFLINE", "1")
        if start.method == LEAKY:
            environment["SGLANG_DDTREE_LEAKY"] = "1"
        if not self.on_gpu:
            environment["OMP_NUM_THREADS"] = str(cpu_threads())
        self.start_s = 0.0
        self.ending: list[psutil.Process] = []
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [*command(pair, self.gate), *self.flags, "--host", "127.0.0.1", "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
                cwd=ROOT,
            )

    def go(self) -> None:
        """Opens the gate, and waits until it serves.

        Raises ServerError where it ends before it serves, or takes longer than START_LIMIT.
        """
        began = time.monotonic()
        self.gate.touch()
        while time.monotonic() - began < START_LIMIT:
            if self.process.poll() is not None:
                raise ServerError(f"ended with status {self.process.returncode}: {self.last_words()}")
            try:
                if requests.get(self.base + "/health", timeout=5).status_code == 200:
                    self.start_s = time.monotonic() - began
                    return
            except requests.RequestException:
                pass
            time.sleep(0.2)
        raise ServerError(f"not ready after {START_LIMIT} s: {self.last_words()}")

    def last_words(self) -> str:
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        said = [line for line in lines if "error" in line.lower()] or lines or ["(no output)"]
        return said[-1][:300]

    def buffers(self) -> dict[str, float] | None:
        """What DDTREE's start-up line says it takes; None for other methods."""
        found = BUFFERS.search(self.log.read_text(errors="replace"))
        if found is None:
            return None
        return dict(gib=float(found[1]), requests=int(found[2]), mib_a_row=float(found[3]))

    def family(self) -> list[psutil.Process]:
        try:
            main = psutil.Process(self.process.pid)
            return [main, *main.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def resident_gib(self) -> float:
        """Memory of all its processes; shared pages count once each."""
        return sum(p.memory_info().rss for p in self.family()) / 2**30

    def drain(self) -> None:
        """Tells it to end once its requests are answered; `stop` waits for that."""
        self.ending = self.family()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """After `drain`: waits for its end, and ends whatever is left."""
        try:
            self.process.wait(STOP_LIMIT)
        except subprocess.TimeoutExpired:
            self.process.kill()
        _, alive = psutil.wait_procs(self.ending, timeout=KILL_LIMIT)
        for process in alive:
            process.kill()
        self.process.wait(KILL_LIMIT)
