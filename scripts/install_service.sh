#!/usr/bin/env bash
# install_service.sh NAME...: install the unit sglang-ddtree@.service and settings /etc/sglang-ddtree/NAME.env for each NAME.
# install_service.sh --uninstall: stop all instances and remove the units; settings, user and state are kept.
# A NAME of scripts/systemd/examples (tp1, tp4, tp8) starts from that example, any other from tp1. Settings that exist are
# kept. Safe to run again: after an update of this checkout, or with more names.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$here")
units=/etc/systemd/system settings=/etc/sglang-ddtree sysusers=/etc/sysusers.d/sglang-ddtree.conf
unit="sglang-ddtree@.service" user=sglang-ddtree router=sglang-ddtree-router.service

fail() { echo "install_service: $*" >&2; exit 1; }
running() { [ -d /run/systemd/system ]; }

put() { # put FILE MODE: standard input becomes FILE, unless it is the same already
    local new
    new=$(mktemp)
    cat > "$new"
    if cmp -s "$new" "$1"; then
        echo "unchanged  $1"
    else
        install -D -m "$2" "$new" "$1"
        echo "installed  $1"
    fi
    rm -f "$new"
}

uninstall() {
    if running; then
        systemctl disable --now 'sglang-ddtree@*.service' "$router" 2>/dev/null || true
        systemctl stop 'sglang-ddtree@*.service' "$router" 2>/dev/null || true
    fi
    rm -f "$units/$unit" "$units/$router" "$units/$unit.d/10-backoff.conf" "$sysusers"
    rm -f "$units"/*.wants/sglang-ddtree@*.service
    rmdir "$units/$unit.d" 2>/dev/null || true
    running && systemctl daemon-reload
    echo "removed; kept: $settings, user $user, /var/lib/sglang-ddtree, /var/cache/sglang-ddtree"
}

[ $# -gt 0 ] || { sed -n '2,5s/^# //p' "${BASH_SOURCE[0]}"; exit 2; }
[ "$(id -u)" = 0 ] || fail "needs root; run it with sudo"
command -v systemctl >/dev/null || fail "no systemctl: this machine has no systemd"
[ "$1" = --uninstall ] && { uninstall; exit; }
for name in "$@"; do
    [[ $name =~ ^[A-Za-z0-9_.-]+$ && $name != -* ]] || fail "NAME $name: use letters, digits, '_', '.' and '-'"
done

. "$here/setup.sh"
setup serve
put "$sysusers" 644 < "$here/systemd/sysusers.conf"
systemd-sysusers "$sysusers"
# The service user runs this interpreter and reads this checkout; a Python below /root is the usual obstacle.
for file in "$venv/bin/python" "$root/python/sglang_ddtree/plugin.py"; do
    setpriv --reuid "$user" --clear-groups test -r "$(readlink -f "$file")" ||
        fail "$file: user $user cannot read it; move the checkout to /opt (and Python: UV_PYTHON_INSTALL_DIR=/opt/python)"
done
# The service cannot write there; without bytecode every start would compile all of SGLang and PyTorch again. Templates in
# some packages are no Python, so the status says nothing.
if ! cmp -s "$venv/.installed-serve" "$venv/.compiled"; then
    echo "compiling Python bytecode into .venv (minutes at the first time)"
    "$venv/bin/python" -m compileall -q -j 0 "$venv"/lib/python*/site-packages >/dev/null 2>&1 || true
    cp "$venv/.installed-serve" "$venv/.compiled"
fi
"$venv/bin/python" -m compileall -q "$root/python" "$root/sgl-kernel" || fail "$root does not compile"

for file in "$unit" "$router"; do
    sed "s|@VENV@|$venv|g" "$here/systemd/$file" | put "$units/$file" 644
done
if [ "$(systemctl --version | sed -n '1s/systemd \([0-9]*\).*/\1/p')" -ge 254 ]; then
    put "$units/$unit.d/10-backoff.conf" 644 < "$here/systemd/backoff.conf"
fi
for name in "$@"; do
    example="$here/systemd/examples/$name.env"
    [ -f "$example" ] || example="$here/systemd/examples/tp1.env"
    if [ -f "$settings/$name.env" ]; then
        echo "kept       $settings/$name.env"
    else
        sed "s/@NAME@/$name/g" "$example" | put "$settings/$name.env" 644
    fi
done
[ -f "$settings/router.env" ] || put "$settings/router.env" 644 < "$here/systemd/examples/router.env"
for name in "$@"; do
    systemd-analyze verify "$units/${unit/@/@$name}" || fail "systemd-analyze verify found the problems above"
done
systemd-analyze verify "$units/$router" || fail "systemd-analyze verify found the problems above"
running && systemctl daemon-reload
echo "next: edit $settings/NAME.env, then systemctl enable --now sglang-ddtree@NAME (drains on stop: journalctl -u sglang-ddtree@NAME)"
