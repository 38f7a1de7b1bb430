"""A real systemd of our own: PID 1 of new pid, mount, cgroup, ipc and uts namespaces, on top of this machine's files.

/etc, /root and /var are overlays whose changes are thrown away; units of the machine are replaced by empty targets, so
nothing but what a test installs is started; the network is the machine's. Needs root, systemd and cgroup v2.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

TARGETS = "basic sysinit shutdown multi-user network-online network sockets timers paths slices umount final local-fs"
JOURNALD = "/lib/systemd/systemd-journald"
SPACES = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--cgroup", "--uts", "--ipc"]
INIT = r"""
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /run
for d in etc root var; do
    mkdir -p /run/over/$d/up /run/over/$d/work
    mount -t overlay overlay -o lowerdir=/$d,upperdir=/run/over/$d/up,workdir=/run/over/$d/work /$d
done
chmod 755 /root
mount -t proc proc /proc
mount --bind /proc/sys /proc/sys && mount -o remount,ro,bind /proc/sys
umount -R /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mkdir /run/stubs
for t in $TARGETS; do printf '[Unit]\nDescription=%s\nDefaultDependencies=no\n' $t > /run/stubs/$t.target; done
cat > /run/stubs/systemd-journald.service <<U
[Unit]
DefaultDependencies=no
[Service]
Type=notify
ExecStart=$JOURNALD
U
mount --bind /run/stubs /usr/lib/systemd/system
rm -rf /etc/systemd/system && mkdir /etc/systemd/system
mkdir -p /etc/systemd/system/basic.target.wants
ln -s /usr/lib/systemd/system/systemd-journald.service /etc/systemd/system/basic.target.wants/
printf '[Journal]\nStorage=volatile\nReadKMsg=no\nRateLimitBurst=0\n' > /etc/systemd/journald.conf
exec env -i container=sglang-ddtree-test PATH=$PATH /usr/lib/systemd/systemd --system --unit=basic.target
"""


def cgroup2() -> Path | None:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[fields.index("-") + 1] == "cgroup2":
            return Path(fields[4])
    return None


def why_not() -> str | None:
    """The reason why a systemd of our own cannot run here; None where it can be tried."""
    if os.geteuid() != 0:
        return "needs root for namespaces"
    for tool in ("unshare", "nsenter", "systemctl", JOURNALD, "/usr/lib/systemd/systemd"):
        if shutil.which(tool) is None:
            return f"needs {tool}"
    group = cgroup2()
    if group is None or not os.access(group, os.W_OK):
        return "needs cgroup v2 that can be written"
    mounts = "mount --make-rprivate / && mount -t tmpfs tmpfs /run"
    tried = subprocess.run([*SPACES, "sh", "-c", mounts], capture_output=True, text=True)
    return f"needs namespaces: {tried.stderr.strip()}" if tried.returncode else None


class PrivateSystemd:
    """Starts on construction; `run` executes a command inside; `close` ends everything in it."""

    def __init__(self, log: Path):
        self.log = log  # what the systemd inside says; its units have the journal
        self.group = cgroup2() / f"sglang-ddtree-test-{os.getpid()}"
        self.group.mkdir()
        join = f'echo $$ > {self.group}/cgroup.procs; exec "$@"'
        self.process = subprocess.Popen(
            ["sh", "-c", join, "sh", *SPACES, "bash", "-c", INIT],
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            env=os.environ | {"TARGETS": TARGETS, "JOURNALD": JOURNALD},
        )
        end = time.monotonic() + 20
        while self.run("systemctl", "is-active", "--quiet", "basic.target", check=False).returncode:
            if self.process.poll() is not None or time.monotonic() > end:
                self.close()
                raise RuntimeError(f"systemd does not start in namespaces here: {log.read_text()[-500:]}")
            time.sleep(0.2)

    def init(self) -> int | None:
        """Pid, on this machine, of the systemd inside."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0]) if children else None

    def run(self, *command, check: bool = True, **kwargs) -> subprocess.CompletedProcess:
        init = self.init()
        if init is None:
            return subprocess.CompletedProcess(command, 255, "", "no init yet")
        enter = ["nsenter", "--target", str(init), "--mount", "--pid", "--cgroup", "--uts", "--ipc"]
        done = subprocess.run([*enter, *map(str, command)], capture_output=True, text=True, **kwargs)
        assert not check or done.returncode == 0, f"{command}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done

    def write(self, path: str, text: str) -> None:
        self.run("bash", "-c", f"mkdir -p $(dirname {path}); cat > {path}", input=text)

    def journal(self, unit: str) -> str:
        return self.run("journalctl", "--no-pager", "-o", "cat", "-u", unit, check=False).stdout

    def close(self) -> None:
        if self.process.poll() is None:
            if init := self.init():
                os.kill(init, signal.SIGKILL)  # the kernel ends the rest of the namespace with it
            self.process.kill()
        self.process.wait(30)
        end = time.monotonic() + 20
        while self.group.exists():
            try:
                for folder, _, _ in os.walk(self.group, topdown=False):
                    os.rmdir(folder)
            except OSError:  # what was killed takes a moment to leave its group
                if time.monotonic() > end:
                    raise
                time.sleep(0.2)
