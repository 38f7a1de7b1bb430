"""SGLang's router in front of three servers: one drains, one is killed, the last takes over."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time

import pytest
import requests
from support.servers import Load, Server, free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("sglang_router") is None, reason='needs the extra "scale" (sglang-router)'
    ),
]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """(router's base URL, three servers)."""
    folder = tmp_path_factory.mktemp("router")
    servers, router = [], None
    try:
        for i in range(3):
            servers.append(Server(folder / f"server{i}"))
        for server in servers:
            server.wait_for("/health", limit=500)
        port = free_port()
        command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--policy", "round_robin", "--prometheus-port", str(free_port())]
        command += ["--health-check-interval-secs", "2", "--health-failure-threshold", "1"]
        command += ["--worker-urls", *(s.base for s in servers)]
        router = subprocess.Popen(command, stdout=(folder / "router").open("w"), stderr=subprocess.STDOUT)
        base, end = f"http://127.0.0.1:{port}", time.monotonic() + 180
        while not ready(base):
            assert router.poll() is None and time.monotonic() < end, (folder / "router").read_text()[-2000:]
            time.sleep(0.5)
        yield base, servers
    finally:
        if router is not None:
            router.terminate()
            router.wait(30)
        for server in servers:
            server.end()


def ready(base: str) -> bool:
    try:
        return requests.get(base + "/readiness", timeout=5).status_code == 200
    except requests.RequestException:
        return False


def served(server: Server) -> int:
    return server.text().count('"POST /v1/completions')


def until(condition) -> None:
    end = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < end, "does not come about"
        time.sleep(0.2)


def test_a_drained_server_costs_nothing(fleet):
    base, (draining, *others) = fleet
    load = Load(base, streams=3, tokens=96)
    try:
        until(lambda: min(map(served, fleet[1])) >= 2)
        assert draining.stop() == 0
        before = load.outcomes["complete"]
        until(lambda: load.outcomes["complete"] >= before + 6)
    finally:
        load.stop()
    print(dict(load.outcomes))
    assert load.lost == []
    assert load.outcomes["refused"] == 0, "the router tries a refused request again elsewhere"


def test_a_killed_server_costs_its_own_streams_only(fleet):
    base, (_, killed, last) = fleet
    load = Load(base, streams=4, tokens=128)
    try:
        until(lambda: load.outcomes["complete"] >= 4)
        assert load.lost == []
        for process in reversed(killed.family()):
            process.kill()
        killed.process.wait(30)
        time.sleep(3)
        lost, before = len(load.lost), load.outcomes["complete"]
        until(lambda: load.outcomes["complete"] >= before + 8)
    finally:
        load.stop()
    print(dict(load.outcomes), load.lost)
    assert lost <= 3, "round robin over two servers: about half of four streams were on the dead one"
    assert len(load.lost) == lost, "streams were lost after the dead server's own"
    assert last.process.poll() is None


def test_no_server_at_all_is_a_503(fleet):
    base, (*_, last) = fleet
    assert last.stop() == 0
    body = {"model": "demo", "prompt": "x", "max_tokens": 4}
    assert requests.post(base + "/v1/completions", json=body, timeout=60).status_code == 503
