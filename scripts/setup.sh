# Sourced by serve.sh and test.sh: makes .venv once and installs this checkout into it. Usage: setup serve | setup dev
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv="$root/.venv"
# Trust what the machine trusts (uv brings its own certificates otherwise); the second name is for older versions.
export UV_SYSTEM_CERTS=${UV_SYSTEM_CERTS:-1} UV_NATIVE_TLS=${UV_NATIVE_TLS:-1}

setup() {
    local extras="" wanted uv=uv
    [ "$1" = dev ] && extras="[dev]"
    wanted=$(cat "$root/pyproject.toml" "$root/requirements.txt" | cksum)
    [ "$(cat "$venv/.installed-$1" 2>/dev/null)" = "$wanted" ] && return
    if ! command -v uv >/dev/null; then
        echo "setup: no uv on this machine; installing it with pip" >&2
        python3 -m pip install --quiet --target "$root/.uv" uv==0.13.9
        uv="$root/.uv/bin/uv"
    fi
    [ -x "$venv/bin/python" ] || "$uv" venv --quiet --python ">=3.11,<3.13" "$venv"
    echo "setup: installing sglang-ddtree$extras into .venv (about 9 GB on disk; minutes at the first time)" >&2
    VIRTUAL_ENV="$venv" "$uv" pip install -r "$root/requirements.txt" -e "$root$extras"
    echo "$wanted" > "$venv/.installed-serve"
    echo "$wanted" > "$venv/.installed-$1"
}

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; }
