"""A server that could not listen says so before it loads weights.

Stock SGLang 0.5.17 finds out after loading, and then waits minutes for its warm-up thread, which talks to whatever
has the port: another SGLang server there would answer in the place of this one.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from sglang_ddtree.server_args import is_ddtree

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


def launch_server(server_args: ServerArgs, *args, **kwargs) -> None:
    """Hook before SGLang launches a server. Raises SystemExit with one line where nothing can listen at its address."""
    if is_ddtree(server_args) and server_args.node_rank == 0:
        check(server_args.host, server_args.port)


def check(host: str, port: int) -> None:
    """Listens at the address for a moment. Raises SystemExit with one line where that fails."""
    try:
        for family, *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            socket.create_server(address[:2], family=family).close()
    except OSError as e:
        reason = e.strerror.partition(" (while")[0].lower()  # create_server adds the address
        raise SystemExit(
            f"error: --port {port}: cannot listen on {host} ({reason}); free it or change --port or --host"
        ) from None
