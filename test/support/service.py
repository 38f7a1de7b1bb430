"""The unit of the demo pair, installed and started in a systemd of our own."""

from __future__ import annotations

import os
import subprocess

import requests
from support.engines import DRAFT, ROOT, TARGET
from support.servers import BIN, CPU_FLAGS, free_port
from support.systemd import PrivateSystemd

NAME = "demo"
UNIT = f"sglang-ddtree@{NAME}.service"
ENV = f"/etc/sglang-ddtree/{NAME}.env"


def settings(port: int) -> str:
    lines = {
        "DDTREE_MODEL": TARGET,
        "DDTREE_DRAFT": DRAFT,
        "DDTREE_TP": 1,
        "DDTREE_HOST": "127.0.0.1",
        "DDTREE_PORT": port,
        "DDTREE_BUDGET": 7,
        "DDTREE_CAP": 4,
        "DDTREE_FLAGS": " ".join([*CPU_FLAGS, "--served-model-name demo --enable-metrics"]),
        "SGLANG_DDTREE_DRAIN_SECONDS": 100,
        "OMP_NUM_THREADS": 1,
    }
    if "PYTHONPATH" in os.environ:  # a checkout that is not the installed one
        lines["PYTHONPATH"] = os.environ["PYTHONPATH"]
    return "# the demo pair\n" + "".join(f"{k}={v}\n" for k, v in lines.items())


class Service:
    """Installs and starts on construction."""

    def __init__(self, systemd: PrivateSystemd):
        self.systemd, self.port = systemd, free_port()
        self.base = f"http://127.0.0.1:{self.port}"
        systemd.write(ENV, settings(self.port))
        systemd.run(ROOT / "scripts/install_service.sh", NAME)
        systemd.run("systemctl", "start", UNIT, timeout=300)

    def show(self, name: str) -> str:
        return self.systemd.run("systemctl", "show", "--value", "-p", name, UNIT).stdout.strip()

    def set_budget(self, *options, name: str = NAME) -> subprocess.CompletedProcess:
        command = [BIN / "python", "-m", "sglang_ddtree", "set-budget", name, *options]
        return self.systemd.run(*command, check=False, timeout=500)

    def info(self) -> dict:
        return requests.get(self.base + "/server_info", timeout=30).json()

    def completes(self) -> bool:
        body = {"model": "demo", "prompt": "def f(", "max_tokens": 4, "temperature": 0}
        return requests.post(self.base + "/v1/completions", json=body, timeout=60).status_code == 200
