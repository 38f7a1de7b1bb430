"""SIGTERM: what was accepted finishes, what is new is refused, the server leaves with status 0 and no traceback."""

from __future__ import annotations

import signal
import threading
import time

import psutil
import pytest
import requests
from support.servers import Server


def long(tokens: int) -> dict:
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return {"text": "def f(x):\n    ", "sampling_params": params, "stream": True}


@pytest.fixture
def start(tmp_path):
    servers = []

    def _start(*flags: str, **env: str) -> Server:
        servers.append(Server(tmp_path / f"log{len(servers)}", *flags, env=env))
        return servers[-1]

    yield _start
    for server in servers:
        server.end()


def in_background(server: Server, answers: list, tokens: int) -> threading.Thread:
    """A long request that has been accepted when this returns."""

    def run():
        with requests.post(server.base + "/generate", json=long(tokens), stream=True, timeout=180) as r:
            answers.append((r.status_code, [line for line in r.iter_lines() if line]))

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(1)
    return thread


def ended_well(server: Server) -> None:
    text = server.text()
    assert "Traceback" not in text and "Initialization failed" not in text, text[-3000:]


def test_running_streams_finish_and_new_requests_are_refused(start):
    server, answers = start(), []
    server.wait_until_ready()
    threads = [in_background(server, answers, 400) for _ in range(3)]
    family = server.family()
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    refused = requests.post(
        server.base + "/v1/completions", json={"model": "demo", "prompt": "x"}, timeout=10
    )
    assert refused.status_code == 503
    assert int(refused.headers["Retry-After"]) > 0
    assert refused.json()["error"]["code"] == "draining"
    health = requests.get(server.base + "/health", timeout=10)
    assert health.status_code == 503
    assert health.json() == {"status": "draining", "open_requests": 3}
    assert requests.get(server.base + "/model_info", timeout=10).status_code == 200
    for thread in threads:
        thread.join(120)
    assert [status for status, _ in answers] == [200] * 3
    assert all(lines[-1] == b"data: [DONE]" and b'"length"' in lines[-2] for _, lines in answers)
    assert server.process.wait(60) == 0
    assert not psutil.wait_procs(family, timeout=10)[1], "left behind"
    ended_well(server)


def test_stop_while_the_warm_up_request_is_in_flight(start):
    """HTTP is up, SGLang's own warm-up request has not been answered: the stop waits for it and is a clean one."""
    server = start()
    server.wait_for("/model_info")
    assert requests.get(server.base + "/health", timeout=5).status_code == 503
    assert server.stop() == 0
    ended_well(server)


@pytest.mark.slow
def test_limit_ends_what_is_still_running(start):
    server, answers = start(SGLANG_DDTREE_DRAIN_SECONDS="1"), []
    server.wait_until_ready()
    thread = in_background(server, answers, 3000)
    assert server.stop(limit=20) == 0
    thread.join(10)
    assert b'"abort"' in b"".join(answers[0][1])
    ended_well(server)
    assert "1 requests aborted at the limit" in server.text()


def test_stop_while_weights_load_leaves_nothing(start):
    server = start()
    end = time.monotonic() + 120
    while not psutil.Process(server.process.pid).children():
        assert server.process.poll() is None and time.monotonic() < end, server.text()[-2000:]
        time.sleep(0.1)
    assert server.stop() == -signal.SIGTERM
    ended_well(server)
