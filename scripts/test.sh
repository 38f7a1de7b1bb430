#!/usr/bin/env bash
# test.sh [pytest arguments]: set up like serve.sh and run the tests, a file at a time in each of two workers (-n 0: in
# this process, for -s or a debugger). GPU tests are skipped where there is no GPU.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
setup dev
cd "$root"
# Many processes import all of SGLang: the first may leave its bytecode for the others.
unset PYTHONDONTWRITEBYTECODE
exec "$venv/bin/python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
