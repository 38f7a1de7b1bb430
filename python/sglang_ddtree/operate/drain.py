"""SIGTERM drains: new requests are refused, accepted ones finish, and the server leaves with status 0.

Stock SGLang 0.5.17 waits for running requests on SIGTERM too, but goes on accepting new ones, so under load it never
ends; it has no limit; a SIGTERM between the start of HTTP and the first request fails the warm-up request, which kills
the server; and it always leaves by SIGKILL, which a service manager takes for a crash.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_ddtree.operate import notify
from sglang_ddtree.server_args import is_ddtree

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

LIMIT_VARIABLE = "SGLANG_DDTREE_DRAIN_SECONDS"
DEFAULT_LIMIT = 120.0
RETRY_AFTER = 10  # seconds, a hint for clients
POLL = 0.1
ABORT_GRACE, SCHEDULER_GRACE, FLUSH_GRACE = 5.0, 15.0, 0.5
HEALTH_PATHS = ("/health", "/health_generate")
# POST requests that start no work on the model and may be of use while it drains.
ALWAYS_ANSWERED = ("/abort_request", "/flush_cache")


@dataclass
class Traffic:
    """What the gate shares with the watchdog of its process. open: accepted POST requests not yet answered in full."""

    manager: TokenizerManager
    open: int = 0

    @property
    def draining(self) -> bool:
        """Not before SGLang's own warm-up request has been answered: refusing that one would kill the server."""
        return self.manager.gracefully_exit and not is_starting(self.manager)


def is_starting(manager: TokenizerManager) -> bool:
    from sglang.srt.managers.tokenizer_manager import ServerStatus

    return manager.server_status == ServerStatus.Starting


def drain_limit() -> float:
    """Seconds that accepted requests may take to finish. Raises ValueError with one line on a bad setting."""
    text = os.environ.get(LIMIT_VARIABLE, "")
    try:
        limit = float(text or DEFAULT_LIMIT)
    except ValueError:
        limit = -1.0
    if not 0 <= limit <= 3600:
        raise ValueError(f"{LIMIT_VARIABLE}: {text!r} is not a number of seconds from 0 to 3600")
    return limit


class DrainGate:
    """ASGI middleware: counts open requests, and answers 503 with Retry-After once draining has begun."""

    def __init__(self, app, traffic: Traffic):
        self.app, self.traffic = app, traffic

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            # Here the event loop runs and uvicorn's signal handlers stand: SGLang's take their place now, not at the
            # first request, so that SIGTERM means the same from the first second of HTTP on.
            self.traffic.manager.auto_create_handle_loop()
            return await self.app(scope, receive, send)
        health = scope["path"] in HEALTH_PATHS
        works = scope["type"] == "websocket" or scope.get("method") == "POST"
        if self.traffic.draining and (health or works) and scope["path"] not in ALWAYS_ANSWERED:
            return await self._refuse(scope, receive, send, health)
        if not works:
            return await self.app(scope, receive, send)
        self.traffic.open += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.traffic.open -= 1

    async def _refuse(self, scope, receive, send, health: bool) -> None:
        if scope["type"] == "websocket":
            await receive()
            return await send({"type": "websocket.close", "code": 1013, "reason": "draining"})
        if health:
            body = {"status": "draining", "open_requests": self.traffic.open}
        else:
            message = "The server is draining before a restart and accepts no new requests; try again later."
            body = {"error": dict(message=message, type="service_unavailable", param=None, code="draining")}
        data = json.dumps(body).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(data)).encode()),
            (b"retry-after", str(RETRY_AFTER).encode()),
        ]
        if scope["http_version"].startswith("1"):
            headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": data})


def setup_http_server(server_args: ServerArgs, tokenizer_manager: TokenizerManager, *args, **kwargs) -> None:
    """Hook before SGLang sets up its HTTP server: adds the gate, and tells a service manager how the server is."""
    if not is_ddtree(server_args) or server_args.tokenizer_worker_num != 1:
        return  # with several tokenizer processes, SGLang's own shutdown applies
    if tokenizer_manager is None:
        # Stock SGLang would go on to start HTTP with nothing behind it.
        raise SystemExit(f"node {server_args.node_rank}: its schedulers have left, as the first node stopped")
    from sglang.srt.entrypoints.http_server import app

    traffic = Traffic(tokenizer_manager)
    tokenizer_manager.ddtree_traffic = traffic
    app.add_middleware(DrainGate, traffic=traffic)
    notify.start(server_args, tokenizer_manager)


async def sigterm_watchdog(original, manager: TokenizerManager) -> None:
    """Hook around SGLang's coroutine of this name: waits for SIGTERM, drains up to the limit, ends the process."""
    traffic = getattr(manager, "ddtree_traffic", None)
    if traffic is None:
        return await original(manager)
    while not manager.gracefully_exit:
        await asyncio.sleep(POLL)
    started, limit = time.monotonic(), drain_limit()
    logger.info("draining: %d open requests, up to %.0f s", traffic.open, limit)
    if not await _idle(traffic, limit):
        logger.warning("draining: %d requests aborted at the limit of %.0f s", traffic.open, limit)
        manager.abort_request(abort_all=True)
        await _idle(traffic, ABORT_GRACE)
    await asyncio.sleep(FLUSH_GRACE)  # the last bytes are on their way to slow readers
    logger.info("drained in %.1f s", time.monotonic() - started)
    await _leave(manager)


async def _idle(traffic: Traffic, limit: float) -> bool:
    """True once no request is open and the warm-up is over; False at the limit."""
    end = time.monotonic() + limit
    while traffic.open or is_starting(traffic.manager):
        if time.monotonic() >= end:
            return False
        await asyncio.sleep(POLL)
    return True


async def _leave(manager: TokenizerManager) -> None:
    """Lets the schedulers free what they hold, ends the children, then this process with status 0."""
    from sglang.srt.managers.io_struct import ShutdownReq
    from sglang.srt.utils import kill_process_tree
    from sglang.srt.utils.cudacore_pyspy_dump_utils import collect_scheduler_processes

    if manager._subprocess_watchdog is not None:
        manager._subprocess_watchdog.stop()  # or the end of a child would be taken for a crash
    manager._dispatch_to_scheduler(ShutdownReq())
    end = time.monotonic() + SCHEDULER_GRACE
    while time.monotonic() < end and collect_scheduler_processes():
        await asyncio.sleep(POLL)
    with contextlib.suppress(RuntimeError):  # a child that outlives SIGKILL is the kernel's
        kill_process_tree(os.getpid(), include_parent=False, wait_timeout=SCHEDULER_GRACE)
    logging.shutdown()
    os._exit(0)
