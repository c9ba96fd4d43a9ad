#!/usr/bin/env bash
# Carries the pinned GPU wheel set to a node without a network (docs/dependencies.md has the set).
#   scripts/offline_gpu.sh fetch   [--wheels DIR] [PACKAGE...]   on a connected machine: download
#   scripts/offline_gpu.sh install [--wheels DIR] [--site DIR]   on the GPU node: prints `export` lines
#   scripts/offline_gpu.sh exec    [--wheels DIR] [--site DIR] -- COMMAND...   install, then run COMMAND
# The node brings Python 3.12 with torch 2.11 (CUDA 13), Triton 3.6 and NVSHMEM; EPDECODE_PYTHON names
# that interpreter (default python3). fetch takes further PACKAGEs where `install` reports some missing.
set -euo pipefail
export PIP_ROOT_USER_ACTION=ignore
root=$(cd "$(dirname "$0")/.." && pwd)
scratch=${TMPDIR:-/tmp}

wheel_set=(
    tokenspeed-deepep==1.2.1.post20251110
    tokenspeed-deepgemm==2.5.0.post20260604
    nvshmem4py-cu13==0.4.1
    pydantic==2.14.4
    pydantic-core==2.50.5
    annotated-types==0.8.0
    typing-inspection==0.4.5
)
# pip matches the number in manylinux_2_N exactly, so every one that a wheel of the set carries.
platforms=(manylinux_2_{34,28,27,24,17}_x86_64 manylinux2014_x86_64 manylinux1_x86_64)
# What a run imports: module names.
needed=(torch triton deep_ep deep_gemm nvshmem numpy pydantic yaml typer rich jinja2 safetensors psutil
    pynvml prometheus_client)

die() {
    printf 'offline_gpu: error: %s\n' "$*" >&2
    exit 3
}

command=${1:-}
[ $# -eq 0 ] || shift
wheels=$root/wheels
site=${EPDECODE_SITE:-$scratch/epdecode-site-$(id -u)}
while [ $# -gt 0 ]; do
    case $1 in
    --wheels) wheels=${2:?--wheels needs a folder} && shift 2 ;;
    --site) site=${2:?--site needs a folder} && shift 2 ;;
    --) shift && break ;;
    -*) die "unknown option $1; accepted: --wheels DIR, --site DIR" ;;
    *) break ;;
    esac
done
python=${EPDECODE_PYTHON:-python3}

fetch() {
    local args=() platform
    for platform in "${platforms[@]}"; do args+=(--platform "$platform"); done
    "$python" -m pip download --no-deps --only-binary=:all: --implementation cp --python-version 3.12 \
        "${args[@]}" --dest "$wheels" "${wheel_set[@]}" "$@"
    echo "offline_gpu: carry $wheels and this repository to the GPU node, then: scripts/offline_gpu.sh exec" \
        "--wheels DIR -- scripts/run.sh" >&2
}

# Files a fresh target from the wheels and moves it into place, so that a broken-off or a concurrent
# install is never seen; the stamp makes the next call free.
install() {
    local stamp fresh
    compgen -G "$wheels/*.whl" >/dev/null || die "no wheels in $wheels; run 'scripts/offline_gpu.sh fetch' \
where there is a network, or name the folder: --wheels DIR"
    stamp=$({ "$python" --version && cd "$wheels" && cksum -- *.whl; } | cksum)
    mkdir -p "$(dirname "$site")"
    exec 9>"$site.lock"
    flock 9
    if [ "$(cat "$site/.stamp" 2>/dev/null)" != "$stamp" ]; then
        # What is about to be replaced must be this script's own.
        [ ! -e "$site" ] || [ -f "$site/.stamp" ] ||
            die "$site exists and was not made by this script; name another folder: --site DIR"
        fresh=$(mktemp -d "$site.XXXXXX")
        "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir \
            --disable-pip-version-check --upgrade --target "$fresh" "$wheels"/*.whl >&2 ||
            { rm -rf "$fresh" && die "pip could not install the wheels of $wheels with $("$python" --version)"; }
        echo "$stamp" >"$fresh/.stamp"
        chmod 755 "$fresh"
        rm -rf "$site"
        mv -T "$fresh" "$site"
        report_missing
    fi
    flock -u 9
    exec 9>&-
}

# find_spec only looks: importing torch costs seconds.
report_missing() {
    PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} "$python" - "${needed[@]}" <<'PY' >&2
import sys
from importlib.util import find_spec
missing = [name for name in sys.argv[1:] if find_spec(name) is None]
if missing:
    print("offline_gpu: warning: not on this node:", ", ".join(missing),
          "(add their packages: scripts/offline_gpu.sh fetch PACKAGE...)")
PY
}

set_environment() {
    local nvshmem cache=${EPDECODE_CACHE:-$scratch/epdecode-cache-$(id -u)}
    export PYTHONPATH=$site:$root${PYTHONPATH:+:$PYTHONPATH}
    # deep_ep links libnvshmem_host.so.3, which the nvidia-nvshmem package keeps inside site-packages.
    nvshmem=$("$python" - <<'PY'
from importlib.util import find_spec
from pathlib import Path
spec = find_spec("nvidia")
folders = [Path(p, "nvshmem", "lib") for p in spec.submodule_search_locations] if spec else []
print(next((str(f) for f in folders if f.is_dir()), ""))
PY
    )
    if [ -n "$nvshmem" ]; then
        export LD_LIBRARY_PATH=$nvshmem${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    fi
    # Compiled kernels stay on this node: on a shared home directory ranks race for half-written files.
    export DG_JIT_CACHE_DIR=${DG_JIT_CACHE_DIR:-$cache/deep_gemm}
    export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$cache/triton}
    export EP_JIT_CACHE_DIR=${EP_JIT_CACHE_DIR:-$cache/deep_ep}
    mkdir -p "$DG_JIT_CACHE_DIR" "$TRITON_CACHE_DIR" "$EP_JIT_CACHE_DIR"
}

case $command in
fetch) fetch "$@" ;;
install)
    install
    set_environment
    for name in PYTHONPATH LD_LIBRARY_PATH DG_JIT_CACHE_DIR TRITON_CACHE_DIR EP_JIT_CACHE_DIR; do
        [ -z "${!name:-}" ] || printf 'export %s=%q\n' "$name" "${!name}"
    done
    ;;
exec)
    [ $# -gt 0 ] || die "exec needs a command: scripts/offline_gpu.sh exec [--wheels DIR] -- COMMAND..."
    install
    set_environment
    exec "$@"
    ;;
*) die "got '${command:-nothing}', accepted: fetch, install, exec" ;;
esac
