#!/usr/bin/env bash
# Every check there is: lint, format, types, tests.
#   scripts/test.sh [pytest arguments]          CPU: makes .venv when needed, under 10 minutes on 2 cores
#   scripts/test.sh --gpu [pytest arguments]    GPU tests only, with the python3 (or EPDECODE_PYTHON)
#                                               that has torch with CUDA; installs nothing
set -euo pipefail
cd "$(dirname "$0")/.."

if [ "${1:-}" = --gpu ]; then
    shift
    python=${EPDECODE_PYTHON:-python3}
    "$python" -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null || {
        echo "test.sh --gpu: $python has no torch with a usable CUDA GPU; name another with" \
            "EPDECODE_PYTHON, or start this through scripts/offline_gpu.sh exec" >&2
        exit 3
    }
    # Only files with GPU tests: the others import test tools that such a machine may lack.
    if [ $# -eq 0 ]; then
        mapfile -t files < <(grep -rl --include='test_*.py' 'mark\.gpu' tests | sort)
        set -- "${files[@]}"
    fi
    exec "$python" -m pytest -m gpu --gpu "$@"
fi

python=$(bash scripts/setup.sh dev)
failed=()
check() {
    echo "== $*" >&2
    "$python" -m "$@" || failed+=("$1${2:+ $2}")
}
check ruff check .
check ruff format --check .
check mypy
check pytest "$@"
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
