# shellcheck shell=bash
# Sourced by the launch scripts: the interpreter, the rank count, and what every launch refuses.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root" || exit 3
python=${EPDECODE_PYTHON:-$root/.venv/bin/python}
[ -x "$python" ] || python=$(command -v "$python" || command -v python3)

refuse() {
    echo "${0##*/}: error: $*" >&2
    exit 3
}

# torchrun gives each rank its variables. Found here already, they are another launch's, and whoever
# reads them first takes this process for a rank that nobody waits for.
for name in RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE; do
    if [ -n "${!name:-}" ]; then
        [ -z "${TORCHELASTIC_RUN_ID:-}" ] || refuse "started by torchrun (double launch): call this script \
once per node, it starts torchrun itself"
        refuse "$name=${!name} is left over from another launch: unset RANK WORLD_SIZE LOCAL_RANK \
LOCAL_WORLD_SIZE"
    fi
done
if [ "${SLURM_STEP_NUM_TASKS:-1}" -gt "${SLURM_STEP_NUM_NODES:-1}" ]; then
    refuse "$SLURM_STEP_NUM_TASKS tasks on $SLURM_STEP_NUM_NODES node(s) (double launch): one task per node, \
torchrun starts the ranks: srun --ntasks-per-node=1"
fi

# shellcheck disable=SC2034  # read by the script that sources this
ranks=
if [ "${1:-}" = --ranks ]; then
    # shellcheck disable=SC2034
    ranks=${2:?--ranks needs a number}
    shift 2
fi

# One thread a rank: torchrun's own choice too, made here so that it need not warn.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Compiled kernels stay on this node: on a shared home directory ranks race for half-written files.
cache=${TMPDIR:-/tmp}/epdecode-cache-$(id -u)
export DG_JIT_CACHE_DIR=${DG_JIT_CACHE_DIR:-$cache/deep_gemm}
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$cache/triton}

# The GPUs of this node: Slurm's count, else the driver's.
count_gpus() {
    if [ -n "${SLURM_GPUS_ON_NODE:-}" ]; then
        echo "$SLURM_GPUS_ON_NODE"
    elif command -v nvidia-smi >/dev/null 2>&1; then
        nvidia-smi --list-gpus 2>/dev/null | wc -l
    else
        echo 0
    fi
}

torchrun() {
    exec "$python" -m torch.distributed.run "$@"
}
