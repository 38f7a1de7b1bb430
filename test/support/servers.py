"""Real servers as a service manager would start them, and a steady load that tells refused requests from lost ones."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path

import openai
import psutil
import requests
from support.engines import DRAFT, ROOT, TARGET
from support.prompts import PROMPTS

BIN = ROOT / ".venv/bin"
TEST_SETTINGS = ("SGLANG_DDTREE_FORK", "TRITON_INTERPRET")  # conftest.py's; no operator has them
# What scripts/serve.sh passes on a machine without a GPU, in fp32 and for a few requests at a time.
CPU_FLAGS = [
    *("--device", "cpu", "--dtype", "float32", "--sleep-on-idle"),
    *("--max-running-requests", "8", "--max-total-tokens", "65536", "--max-mamba-cache-size", "96"),
]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Running:
    """A command that serves the demo pair, in a session of its own; its output goes to a file."""

    def __init__(self, command: list, port: int, log: Path, env: dict[str, str] | None = None):
        self.port, self.log = port, log
        self.base = f"http://127.0.0.1:{port}"
        environment = {k: v for k, v in os.environ.items() if k not in TEST_SETTINGS}
        self.process = subprocess.Popen(
            command,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment | (env or {}),
            # A test run in the background inherits an ignored Ctrl-C, which a shell cannot trap; a terminal's is not.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def text(self) -> str:
        return self.log.read_text()

    def family(self) -> list[psutil.Process]:
        main = psutil.Process(self.process.pid)
        return [main, *main.children(recursive=True)]

    def stop(self, number: int = signal.SIGTERM, limit: float = 90) -> int:
        """Signals the main process alone; returns its exit status within `limit` seconds, a drain included, and
        asserts that it leaves nothing behind."""
        family = self.family()
        self.process.send_signal(number)
        status = self.process.wait(limit)
        _, alive = psutil.wait_procs(family, timeout=10)
        assert not alive, f"left behind: {alive}"
        return status

    def end(self) -> None:
        """For the end of a test that may have failed: kills what is left of this server."""
        if self.process.poll() is None:
            for process in reversed(self.family()):
                process.kill()
            self.process.wait(90)


class Server(Running):
    """One `sglang serve` of the demo pair with DDTREE."""

    def __init__(self, log: Path, *flags: str, env: dict[str, str] | None = None):
        port = free_port()
        command = [BIN / "sglang", "serve", "--model-path", TARGET, "--served-model-name", "demo"]
        command += ["--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", DRAFT, *CPU_FLAGS]
        super().__init__([*command, "--host", "127.0.0.1", "--port", str(port), *flags], port, log, env)

    def wait_for(self, path: str, limit: float = 400) -> None:
        """Waits until GET path answers 200."""
        end = time.monotonic() + limit
        while True:
            assert self.process.poll() is None, self.text()[-2000:]
            assert time.monotonic() < end, f"no {path} in time:\n{self.text()[-2000:]}"
            try:
                if requests.get(self.base + path, timeout=5).status_code == 200:
                    return
            except requests.RequestException:
                time.sleep(0.1)
            else:
                time.sleep(0.1)

    def wait_until_ready(self) -> None:
        self.wait_for("/health")


class Load:
    """Streams at a fixed concurrency until told to stop.

    A request is accepted when its status line has arrived; one that was accepted and then broke off, or ended for
    another reason than its length, is lost. One that got 503 or no connection is refused: its client tries again.
    """

    def __init__(self, base: str, streams: int, tokens: int, model: str = "demo"):
        self.client = openai.OpenAI(base_url=base + "/v1", api_key="none", max_retries=0, timeout=180)
        self.tokens, self.model = tokens, model
        self.outcomes: Counter[str] = Counter()
        self.lost: list[str] = []
        self.running = True
        self.lock = threading.Lock()
        self.threads = [threading.Thread(target=self._run, args=(i,)) for i in range(streams)]
        for thread in self.threads:
            thread.start()

    def _run(self, number: int) -> None:
        turn = number
        while self.running:
            outcome = self._one(PROMPTS[turn % len(PROMPTS)])
            turn += len(self.threads)
            with self.lock:
                self.outcomes[outcome] += 1
            if outcome == "refused":
                time.sleep(0.5)

    def _one(self, prompt: str) -> str:
        try:
            stream = self.client.completions.create(
                model=self.model,
                prompt=prompt,
                max_tokens=self.tokens,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            )
        except (openai.APIConnectionError, openai.InternalServerError):
            return "refused"
        try:
            reasons = [c.finish_reason for chunk in stream for c in chunk.choices if c.finish_reason]
        except Exception as e:
            reasons = [f"{type(e).__name__}: {e}"]
        if reasons == ["length"]:
            return "complete"
        with self.lock:
            self.lost.append(f"{reasons}")
        return "lost"

    def stop(self, limit: float = 180) -> None:
        self.running = False
        for thread in self.threads:
            thread.join(limit)
            assert not thread.is_alive(), "a stream hangs"
