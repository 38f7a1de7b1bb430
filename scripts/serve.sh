#!/usr/bin/env bash
# serve.sh [any SGLang flag]: serve the demo pair with DDTREE on 127.0.0.1:30000, in the foreground. Flags given here win.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
setup serve

flags=(
    --model-path "$root/models/demo-target" --served-model-name demo
    --speculative-algorithm DDTREE --speculative-draft-model-path "$root/models/demo-draft"
    --host 127.0.0.1 --port 30000
)
if ! has_gpu; then
    # Two cores serve a handful of requests at a time; SGLang would reserve most of the machine's memory.
    flags+=(--device cpu --dtype float32 --max-running-requests 8 --max-total-tokens 65536 --max-mamba-cache-size 96)
    flags+=(--sleep-on-idle)
    cores=$(nproc)
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores < 4 ? cores : 4))}
fi
flags+=("$@")

host=127.0.0.1 port=30000
for ((i = 1; i <= $#; i++)); do
    next=$((i + 1))
    case "${!i}" in
        --port) port=${!next-} ;; --port=*) port=${!i#*=} ;;
        --host) host=${!next-} ;; --host=*) host=${!i#*=} ;;
        -h | --help) exec "$venv/bin/sglang" serve --help ;;
    esac
done
[ "$host" = 0.0.0.0 ] && host=127.0.0.1

export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}
started=$(date +%s)
"$venv/bin/sglang" serve "${flags[@]}" &
server=$!
stopping=""
trap 'stopping=yes; kill -TERM $server 2>/dev/null' INT TERM

announce() {
    until curl -sf -o /dev/null "http://$host:$port/health"; do
        kill -0 $server 2>/dev/null || return
        sleep 1
    done
    cat <<TEXT

ready after $(($(date +%s) - started)) s. Try:

  curl http://$host:$port/v1/completions -H 'Content-Type: application/json' -d '{"model": "demo", "prompt": "class Point:\n    def __init__(self, x, y):\n        self.x = x\n", "max_tokens": 48, "temperature": 0}'

TEXT
}
announce &

# wait returns early when a trapped signal arrives. SGLang ends itself with SIGKILL, which is no news after a stop.
status=0
while kill -0 $server 2>/dev/null; do
    { wait $server; } 2>/dev/null || status=$?
done
[ -n "$stopping" ] && exit 0
exit $status
