"""The unit under a real systemd: installed, changed under load, killed, drained.

Minutes as root in namespaces of its own, with a checkout that another user can read: so only on demand, with
SGLANG_DDTREE_TEST_SYSTEMD=short, or =whole for what is marked so (more changes, the router's unit, the watchdog).
Twenty changes under load: benchmark/serving/budget_changes.py.
"""

from __future__ import annotations

import importlib.util
import os
import re
import time

import pytest
import requests
from support.bench import bench_serving
from support.engines import ROOT
from support.servers import Load, free_port
from support.service import ENV, UNIT, Service
from support.systemd import PrivateSystemd, why_not

pytestmark = pytest.mark.timeout(900)  # a change stops and starts a server, once more if it rolls back
FORM = os.environ.get("SGLANG_DDTREE_TEST_SYSTEMD")
WHOLE = FORM == "whole"
whole = pytest.mark.skipif(not WHOLE, reason="part of the whole form: SGLANG_DDTREE_TEST_SYSTEMD=whole")


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    if FORM not in ("short", "whole"):
        pytest.skip(
            "set SGLANG_DDTREE_TEST_SYSTEMD=short or =whole; test_drain.py covers the stop without a systemd"
        )
    if reason := why_not():
        pytest.fail(f"a systemd of our own {reason}")
    systemd = PrivateSystemd(tmp_path_factory.mktemp("systemd") / "log")
    try:
        yield Service(systemd)
    finally:
        systemd.close()


def test_start_returns_when_it_serves_as_its_own_user(service):
    assert service.completes()
    assert service.show("User") == "sglang-ddtree"
    status = service.systemd.run(
        "grep", "-E", "^(Uid|NoNewPrivs|CapEff)", f"/proc/{service.show('MainPID')}/status"
    )
    lines = dict(line.split(":\t", 1) for line in status.stdout.splitlines())
    assert lines["Uid"].split()[0] != "0"
    assert (lines["NoNewPrivs"], int(lines["CapEff"], 16)) == ("1", 0)
    assert service.show("StatusText") == f"serving on port {service.port}, budget 7, cap 4"


def test_bench_serving_pointed_at_the_unit_reports_the_acceptance_of_metrics(service, tmp_path):
    reported, tau = bench_serving(service.base, tmp_path)
    assert reported == pytest.approx(tau, abs=1e-9)


def test_changes_under_load_lose_nothing(service):
    changes = ((15, 8), (3, 2)) if WHOLE else ((3, 2),)
    load = Load(service.base, streams=2, tokens=96)
    try:
        for budget, cap in changes:
            done = service.set_budget("--budget", str(budget), "--cap", str(cap))
            assert done.returncode == 0, done.stdout + done.stderr
            print(done.stdout.strip())
            assert f"budget {budget}, cap {cap}, serving again" in done.stdout
            info = service.info()
            assert (info["speculative_ddtree_budget"], info["speculative_ddtree_topk_cap"]) == (budget, cap)
            before = load.outcomes["complete"]
            while load.outcomes["complete"] < before + 2:
                time.sleep(0.2)
    finally:
        load.stop()
    print(dict(load.outcomes))
    assert load.lost == [] and load.outcomes["complete"] > 2 * len(changes)
    assert service.show("NRestarts") == "0", "a restart by systemd means that a stop was taken for a crash"
    text = service.systemd.run("cat", ENV).stdout
    assert text.startswith("# the demo pair\n") and "DDTREE_BUDGET=3\nDDTREE_CAP=2\n" in text
    assert "Traceback" not in service.systemd.journal(UNIT)


@whole
@pytest.mark.skipif(
    importlib.util.find_spec("sglang_router") is None, reason='needs the extra "scale" (sglang-router)'
)
def test_the_router_is_a_unit_too(service):
    port, own = free_port(), free_port()
    service.systemd.write(
        "/etc/sglang-ddtree/router.env",
        f"ROUTER_HOST=127.0.0.1\nROUTER_PORT={port}\nROUTER_WORKERS={service.base}\n"
        f"ROUTER_FLAGS=--policy cache_aware --prometheus-port {own}\n",
    )
    service.systemd.run("systemctl", "start", "sglang-ddtree-router")
    end = time.monotonic() + 60
    body = {"model": "demo", "prompt": "def f(", "max_tokens": 4, "temperature": 0}
    status = None
    while status != 200:
        assert time.monotonic() < end, service.systemd.journal("sglang-ddtree-router")[-2000:]
        try:
            status = requests.post(
                f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60
            ).status_code
        except requests.ConnectionError:
            time.sleep(0.5)
    service.systemd.run("systemctl", "stop", "sglang-ddtree-router", timeout=60)
    assert (
        service.systemd.run("systemctl", "show", "--value", "-p", "Result", "sglang-ddtree-router").stdout
        == "success\n"
    )


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        pytest.param(("--budget", "0"), "Invalid value for '--budget'", marks=whole),
        (
            ("--budget", "100000"),
            "--speculative-ddtree-budget: budget + 1 = 100001 rows exceed the context length",
        ),
        pytest.param(
            ("--budget", "7", "--cap", "9999"),
            "--speculative-ddtree-topk-cap: 9999 is above the vocabulary size",
            marks=whole,
        ),
    ],
)
def test_a_bad_value_is_refused_before_anything_stops(service, options, complaint):
    before = service.show("MainPID"), service.systemd.run("cat", ENV).stdout
    done = service.set_budget(*options)
    said = re.sub(r"\s+", " ", done.stdout + done.stderr)
    assert done.returncode != 0 and complaint in said, said
    assert (service.show("MainPID"), service.systemd.run("cat", ENV).stdout) == before


def test_what_does_not_come_up_is_rolled_back(service):
    """A drop-in that fails for this budget only, which the checks beforehand cannot know."""
    text = service.systemd.run("cat", ENV).stdout
    old = re.search(r"DDTREE_BUDGET=(\d+)", text)[1]
    folder = f"/etc/systemd/system/{UNIT}.d"
    service.systemd.write(f"{folder}/trap.conf", "[Service]\nExecStartPre=sh -c '[ $DDTREE_BUDGET != 6 ]'\n")
    service.systemd.run("systemctl", "daemon-reload")
    try:
        done = service.set_budget("--budget", "6")
    finally:
        service.systemd.run("rm", "-r", folder)
        service.systemd.run("systemctl", "daemon-reload")
    assert done.returncode == 1
    assert "did not come up" in done.stderr and "rolled back: it serves with budget" in done.stderr
    assert service.systemd.run("cat", ENV).stdout == text
    assert service.info()["speculative_ddtree_budget"] == int(old)


def scheduler(service: Service) -> str:
    """Pid, inside the systemd of our own, of the scheduler process."""
    group = service.show("ControlGroup")
    pids = service.systemd.run("cat", f"/sys/fs/cgroup{group}/cgroup.procs").stdout.split()
    names = {pid: service.systemd.run("cat", f"/proc/{pid}/comm").stdout.strip() for pid in pids}
    return next(pid for pid, name in names.items() if name.startswith("sglang::sched"))


def wait_for_a_restart(service: Service, limit: float = 300) -> None:
    end = time.monotonic() + limit
    while service.show("NRestarts") == "0" or service.show("ActiveState") != "active":
        assert time.monotonic() < end, service.systemd.journal(UNIT)[-2000:]
        time.sleep(1)


def test_a_killed_scheduler_is_restarted_and_serves_again(service):
    service.systemd.run("kill", "-9", scheduler(service))
    wait_for_a_restart(service)
    assert service.completes()


@whole
def test_a_hanging_scheduler_is_found_by_the_watchdog(service):
    folder, watchdog = f"/etc/systemd/system/{UNIT}.d", 30
    service.systemd.write(f"{folder}/watchdog.conf", f"[Service]\nWatchdogSec={watchdog}\n")
    service.systemd.run("systemctl", "daemon-reload")
    service.systemd.run("systemctl", "restart", UNIT, timeout=300)
    try:
        assert service.show("NRestarts") == "0"
        service.systemd.run("kill", "-STOP", scheduler(service))
        hung = time.monotonic()
        while (result := service.show("Result")) == "success":  # until systemd starts it again, 5 s later
            assert time.monotonic() < hung + 3 * watchdog, "the watchdog does not bite"
            time.sleep(0.2)
        found = time.monotonic() - hung
        assert result == "watchdog"
        wait_for_a_restart(service)
        print(f"hangs: ended after {found:.0f} s, serves after {time.monotonic() - hung:.0f} s")
        assert service.completes()
    finally:
        service.systemd.run("rm", "-r", folder)
        service.systemd.run("systemctl", "daemon-reload")


def test_stop_finishes_running_streams(service):
    load = Load(service.base, streams=2, tokens=192)
    while sum(thread.is_alive() for thread in load.threads) < 2:
        time.sleep(0.1)
    time.sleep(1)
    service.systemd.run("systemctl", "stop", UNIT, timeout=200)
    load.stop()
    assert load.lost == [] and load.outcomes["complete"] >= 2
    assert (service.show("ActiveState"), service.show("Result")) == ("inactive", "success")


def test_uninstall_leaves_settings_and_no_unit(service):
    said = service.systemd.run(ROOT / "scripts/install_service.sh", "--uninstall").stdout
    assert "kept: /etc/sglang-ddtree" in said
    assert service.systemd.run("systemctl", "cat", UNIT, check=False).returncode != 0
    assert service.systemd.run("test", "-f", ENV, check=False).returncode == 0
