"""What goes wrong around a service, without one: each is refused in one line, and nothing is left half done."""

from __future__ import annotations

import errno
import os
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from sglang_ddtree.operate import port, set_budget, unit
from sglang_ddtree.operate.unit import OperateError, Unit

SETTINGS = "".join(f"DDTREE_{name}=1\n" for name in unit.REQUIRED)


@pytest.fixture
def one(tmp_path, monkeypatch) -> Unit:
    monkeypatch.setattr(unit, "SETTINGS", tmp_path)
    (tmp_path / "one.env").write_text(SETTINGS)
    return Unit("one")


@pytest.mark.parametrize("name", ["../one", "sglang-ddtree@one.service", "-one", "", "a b"])
def test_a_name_that_cannot_be_one_is_refused(name):
    with pytest.raises(OperateError, match="^NAME .*give NAME$"):
        Unit(name)


@pytest.mark.parametrize(
    ("number", "complaint"),
    [(errno.ENOSPC, "No space left.*it is as it was"), (errno.EACCES, "run this as root")],
)
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_settings_that_cannot_be_written_stay_as_they_were(one, monkeypatch, call, number, complaint):
    """The system call fails as it does on a full disk or for another user; nothing is left beside the settings."""

    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OperateError, match=complaint):
        one.replace("DDTREE_BUDGET=2\n")
    assert one.text() == SETTINGS
    assert [p.name for p in unit.SETTINGS.iterdir()] == ["one.env"]


def test_flags_are_split_as_systemd_does():
    assert unit.flags({"DDTREE_FLAGS": "--a 'b c'  --d"}) == ["--a", "b c", "--d"]
    for text in ("--a 'b", "--a \\"):
        with pytest.raises(OperateError, match="^DDTREE_FLAGS: .*in one line"):
            unit.flags({"DDTREE_FLAGS": text})


def test_tls_of_the_server_itself_is_refused():
    with pytest.raises(OperateError, match="^DDTREE_FLAGS: .*plain HTTP"):
        unit.url({"DDTREE_HOST": "::1", "DDTREE_PORT": "1", "DDTREE_FLAGS": "--ssl-certfile=x"})


def test_without_systemd_it_says_so(one, monkeypatch):
    monkeypatch.setenv("PATH", str(unit.SETTINGS))
    with pytest.raises(OperateError, match="^systemctl: not found"):
        one.show("ActiveState")


class Locked(BaseHTTPRequestHandler):
    """A server with another key."""

    def do_GET(self):
        self.send_response(401)
        self.end_headers()

    def log_message(self, *_):
        pass


def test_a_refused_key_is_found_before_the_settings_change(one, monkeypatch):
    server = HTTPServer(("127.0.0.1", 0), Locked)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    text = SETTINGS.replace("HOST=1", "HOST=127.0.0.1").replace("PORT=1", f"PORT={server.server_port}")
    one.path.write_text(text)
    monkeypatch.setattr(Unit, "show", lambda *_: "active")
    try:
        with pytest.raises(OperateError, match="SGLANG_API_KEY"):
            set_budget.apply(one, 2, 1, check=False)
    finally:
        server.shutdown()
        server.server_close()
    assert one.text() == text


def test_a_port_that_is_taken_is_named_before_anything_loads():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(SystemExit, match=f"^error: --port {number}: .*address already in use"):
            port.check("127.0.0.1", number)
    port.check("127.0.0.1", number)
    with pytest.raises(SystemExit, match="^error: --port 1: cannot listen on 192.0.2.1"):
        port.check("192.0.2.1", 1)


def test_ctrl_c_during_the_restart_brings_the_old_settings_back(one, monkeypatch):
    """The restart is interrupted; the one that brings the old settings back fails too, and both are told."""
    seen = []

    def systemctl(unit_: Unit, verb: str) -> bool:
        seen.append((verb, "DDTREE_BUDGET=2\n" in unit_.text()))
        if seen[-1] == ("restart", True):
            raise KeyboardInterrupt
        return verb != "restart"

    monkeypatch.setattr(Unit, "show", lambda _, name: "active" if name == "ActiveState" else "exit-code")
    monkeypatch.setattr(Unit, "systemctl", systemctl)
    with pytest.raises(
        OperateError, match=r"^interrupted; the old settings are back .*did not come up \(exit-code"
    ):
        set_budget.apply(one, 2, 1, check=False)
    assert one.text() == SETTINGS
    assert [call for call in seen if call[0] == "restart"] == [("restart", True), ("restart", False)]
