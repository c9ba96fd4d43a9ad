#!/usr/bin/env bash
# Makes the Python environment that run.sh and test.sh use, and prints its interpreter on stdout.
#   scripts/setup.sh        what a run needs
#   scripts/setup.sh dev    and the test tools
# EPDECODE_PYTHON=<interpreter> takes that one as it is and installs nothing.
set -euo pipefail
export PIP_ROOT_USER_ACTION=ignore
cd "$(dirname "$0")/.."
extra=${1:-}

log() { printf 'setup: %s\n' "$*" >&2; }
die() {
    printf 'setup: error: %s\n' "$*" >&2
    exit 3
}

# A GPU that DeepEP and DeepGEMM can use needs compute capability 9.0 or above.
has_gpu() {
    command -v nvidia-smi >/dev/null 2>&1 &&
        nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null |
        awk -F. '$1 >= 9 {found = 1} END {exit !found}'
}

# An interpreter that can already do the GPU job (a container, or offline_gpu.sh exec) is left alone.
# find_spec, not import: deep_gemm wants a CUDA toolkit merely to be imported.
is_gpu_ready() {
    "$1" - <<'PY' >/dev/null 2>&1
import importlib.util as u, sys
import torch
found = all(u.find_spec(n) for n in ("deep_ep", "deep_gemm", "pydantic", "typer", "yaml"))
sys.exit(not (found and torch.cuda.is_available() and sys.version_info >= (3, 11)))
PY
}

# Each candidate is run, since a version manager's shim may exist for a Python that does not.
find_python() {
    local name
    for name in "$@"; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            command -v "$name"
            return
        fi
    done
    die "Python 3.11 or above is needed, tried: $*; found: $(python3 --version 2>&1 || true). \
Install it, or name it: EPDECODE_PYTHON=/path/to/python"
}

pip_install() {
    local venv_python=$1 output
    shift
    output=$("$venv_python" -m pip install --disable-pip-version-check "$@" 2>&1) || die "$output
pip could not install $*: see above. On a machine without a package index, install the packages of \
pyproject.toml by hand and name the interpreter: EPDECODE_PYTHON=/path/to/python"
}

if [ -n "${EPDECODE_PYTHON:-}" ]; then
    command -v "$EPDECODE_PYTHON" || die "EPDECODE_PYTHON=$EPDECODE_PYTHON is no program"
    exit
fi

if has_gpu; then
    if is_gpu_ready python3; then
        command -v python3
        exit
    fi
    extras="cuda${extra:+,$extra}"
    # The cuda extra's wheels are built for this one version.
    python=$(find_python python3.12)
    first=('torch>=2.11,<2.13')
else
    extras=$extra
    python=$(find_python python3 python3.12 python3.13 python3.11)
    # Alone and exact, before anything asks for a range: pip then takes the CPU build where its
    # settings name one, and Triton's interpreter is the version the kernels are compiled with.
    first=('torch==2.13.0')
    [ "$(uname -s)" != Linux ] || first+=('triton>=3.6,<3.7')
fi

venv=.venv
wanted=$({
    echo "${first[*]}"
    "$python" --version
    cat pyproject.toml
} | cksum | tr -d ' ')
# What a dev environment holds is enough for a run.
for have in "${extras:-run}" "${extras:+$extras,}dev"; do
    if [ "$(cat "$venv/.epdecode-$have" 2>/dev/null)" = "$wanted" ]; then
        echo "$PWD/$venv/bin/python"
        exit
    fi
done

log "installing into $venv with $("$python" --version) (once; about a minute)"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip_install "$venv/bin/python" "${first[@]}"
pip_install "$venv/bin/python" --editable ".${extras:+[$extras]}"
echo "$wanted" >"$venv/.epdecode-${extras:-run}"
echo "$PWD/$venv/bin/python"
