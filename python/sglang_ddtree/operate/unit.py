"""One instance of the unit sglang-ddtree@.service: its settings file, its state in systemd, its server over HTTP."""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import requests

SETTINGS = Path("/etc/sglang-ddtree")
REQUIRED = ("MODEL", "DRAFT", "TP", "HOST", "PORT", "BUDGET", "CAP")
_NAME = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.-]*")
_LINE = re.compile(r"^\s*([A-Za-z_][A-Za-z0-9_]*)=(.*)$")


class OperateError(Exception):
    """What the operator must do differently: one line that names the flag or setting and the remedy."""


@dataclass(frozen=True)
class Unit:
    """name: the instance, NAME in sglang-ddtree@NAME. Raises OperateError where it cannot be one."""

    name: str

    def __post_init__(self):
        if not _NAME.fullmatch(self.name):
            raise OperateError(
                f"NAME {self.name}: letters, digits, '_', '.' and '-' only; of sglang-ddtree@NAME.service, give NAME"
            )

    @property
    def service(self) -> str:
        return f"sglang-ddtree@{self.name}.service"

    @property
    def path(self) -> Path:
        return SETTINGS / f"{self.name}.env"

    def text(self) -> str:
        """The settings file as it stands. Raises OperateError where there is none."""
        try:
            return self.path.read_text()
        except FileNotFoundError:
            known = ", ".join(sorted(p.stem for p in SETTINGS.glob("*.env"))) or "none"
            raise OperateError(
                f"NAME {self.name}: no {self.path} (there: {known}); scripts/install_service.sh {self.name} makes it"
            ) from None

    def replace(self, text: str) -> None:
        """Puts text in the place of the settings file, atomically, with its owner and mode.

        Raises OperateError where it cannot be written; the file is then as it was.
        """
        new = None
        try:
            before = self.path.stat()
            handle, new = tempfile.mkstemp(dir=SETTINGS, prefix=f".{self.name}.")
            with os.fdopen(handle, "w") as f:
                f.write(text)
                f.flush()
                os.fchmod(f.fileno(), before.st_mode & 0o7777)
                os.fchown(f.fileno(), before.st_uid, before.st_gid)
                os.fsync(f.fileno())
            os.replace(new, self.path)
        except OSError as e:
            if new is not None:
                Path(new).unlink(missing_ok=True)
            remedy = "run this as root" if isinstance(e, PermissionError) else "it is as it was"
            raise OperateError(f"{self.path}: not writable ({e.strerror}); {remedy}") from None

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keeps a second set-budget or sweep of any instance out while one is at work."""
        try:
            folder = os.open(SETTINGS, os.O_RDONLY)
        except FileNotFoundError:
            raise OperateError(
                f"NAME {self.name}: no {SETTINGS}; scripts/install_service.sh {self.name} makes it"
            ) from None
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise OperateError(f"{SETTINGS}: another set-budget or sweep is at work; wait for it") from None
        finally:
            os.close(folder)

    def systemctl(self, verb: str) -> bool:
        """Runs `systemctl verb` on the unit and waits for it; True where it succeeded."""
        return subprocess.run(["systemctl", verb, self.service], stdin=subprocess.DEVNULL).returncode == 0

    def show(self, name: str) -> str:
        """A property of the unit, as `systemctl show` prints it. Raises OperateError without a systemd that answers."""
        command = ["systemctl", "show", "--value", "--property", name, self.service]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except FileNotFoundError:
            raise OperateError("systemctl: not found; the unit needs systemd") from None
        except subprocess.CalledProcessError as e:
            raise OperateError(f"systemctl: {' '.join(e.stderr.split())}; the unit needs systemd") from None

    def server_info(self, settings: dict[str, str]) -> dict:
        """What the server says of itself. Raises OperateError where it wants another key, requests.RequestException
        where it does not answer."""
        key = os.environ.get("SGLANG_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        answer = requests.get(url(settings) + "/server_info", headers=headers, timeout=30)
        if answer.status_code in (401, 403):
            raise OperateError(f"{url(settings)}: the server has --api-key; put its key into SGLANG_API_KEY")
        answer.raise_for_status()
        return answer.json()


def parse(text: str, path: Path) -> dict[str, str]:
    """The assignments of a settings file, quotes removed. Raises OperateError where a required one is missing."""
    found = {}
    for line in text.splitlines():
        if match := _LINE.match(line):
            value = match[2].strip()
            quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
            found[match[1]] = value[1:-1] if quoted else value
    for name in REQUIRED:
        if not found.get(f"DDTREE_{name}"):
            raise OperateError(f"{path}: DDTREE_{name} is not set; add a line DDTREE_{name}=...")
    return found


def edit(text: str, changes: dict[str, object]) -> str:
    """The text of a settings file with the values of `changes`; comments, order and other lines stay."""
    lines, rest = [], dict(changes)
    for line in text.splitlines():
        match = _LINE.match(line)
        if match and match[1] in changes:
            if match[1] in rest:
                lines.append(f"{match[1]}={rest.pop(match[1])}")
            continue
        lines.append(line)
    return "\n".join([*lines, *(f"{k}={v}" for k, v in rest.items())]) + "\n"


def arguments(settings: dict[str, str]) -> list[str]:
    """The arguments of `sglang serve` that ExecStart of the unit makes of the settings. Raises OperateError."""
    s = {k.removeprefix("DDTREE_"): v for k, v in settings.items()}
    return [
        *("--model-path", s["MODEL"], "--speculative-draft-model-path", s["DRAFT"]),
        *("--tp-size", s["TP"], "--host", s["HOST"], "--port", s["PORT"]),
        *("--speculative-algorithm", "DDTREE"),
        *("--speculative-ddtree-budget", s["BUDGET"], "--speculative-ddtree-topk-cap", s["CAP"]),
        *flags(settings),
    ]


def flags(settings: dict[str, str]) -> list[str]:
    """The words of DDTREE_FLAGS as systemd splits them. Raises OperateError."""
    try:
        return shlex.split(settings.get("DDTREE_FLAGS", ""))
    except ValueError as e:
        raise OperateError(f"DDTREE_FLAGS: {e}; write it in one line and close its quotes") from None


def url(settings: dict[str, str]) -> str:
    """Where the server of these settings answers on this machine. Raises OperateError."""
    if any(flag.startswith("--ssl-") for flag in flags(settings)):
        raise OperateError(
            "DDTREE_FLAGS: set-budget and sweep speak plain HTTP; leave --ssl-* to a proxy before the server, "
            "or edit the settings and restart the unit by hand"
        )
    host = settings["DDTREE_HOST"]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{settings['DDTREE_PORT']}"
