"""What a server tells systemd (sd_notify(3)): READY when it serves, WATCHDOG while /health_generate answers, STOPPING.

Does nothing where NOTIFY_SOCKET is not set, which is everywhere but in a unit of Type=notify.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import TYPE_CHECKING

import requests

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.server_args import ServerArgs

POLL = 0.2


def tell(*assignments: str) -> None:
    """Sends assignments such as READY=1 to the service manager; without one, or when it is gone, does nothing."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as s:
            s.sendto("\n".join(assignments).encode(), address)
    except OSError:
        pass  # the manager is gone; serving goes on without it


def start(server_args: ServerArgs, manager: TokenizerManager) -> None:
    """Starts the thread that keeps the service manager informed until the process ends."""
    if os.environ.get("NOTIFY_SOCKET"):
        threading.Thread(target=_run, args=(server_args, manager), name="sd-notify", daemon=True).start()


def _run(server_args: ServerArgs, manager: TokenizerManager) -> None:
    from sglang_ddtree.operate.drain import is_starting

    while is_starting(manager) and not manager.gracefully_exit:
        time.sleep(POLL)
    if not manager.gracefully_exit:
        budget, cap = server_args.speculative_ddtree_budget, server_args.speculative_ddtree_topk_cap
        tell("READY=1", f"STATUS=serving on port {server_args.port}, budget {budget}, cap {cap}")
    period = int(os.environ.get("WATCHDOG_USEC", 0)) / 1e6 / 3
    due = time.monotonic()
    while not manager.gracefully_exit:
        if period and time.monotonic() >= due:
            if _answers(server_args, period):
                tell("WATCHDOG=1")
            due = time.monotonic() + period
        time.sleep(POLL)
    tell("STOPPING=1", "STATUS=draining")


def _answers(server_args: ServerArgs, limit: float) -> bool:
    """True where /health_generate makes the model produce a token within the limit, in seconds."""
    try:
        url = server_args.url() + "/health_generate"
        return requests.get(url, timeout=limit, verify=server_args.ssl_verify()).status_code == 200
    except requests.RequestException:
        return False
