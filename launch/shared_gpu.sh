#!/usr/bin/env bash
# Several ranks on one GPU: for correctness. The result says shared_gpu and reports no speed.
#   launch/shared_gpu.sh [--ranks N] [--mps] [arguments of epdecode.run]                 default: 2 ranks
# --mps  a private MPS daemon lets the ranks' kernels run at once; without it the GPU takes turns in
#        time slices. DeepEP's low-latency kernels must then all be resident at once: they hang with 4 or
#        more ranks, and a run with 2 was seen to stop in its first exchange. Leave it out for deepep_ll.
set -euo pipefail
# shellcheck source=launch/common.sh
. "$(dirname "$0")/common.sh"

# The first GPU only: every rank takes device local_rank modulo the number of devices.
first=${CUDA_VISIBLE_DEVICES:-0}
export CUDA_VISIBLE_DEVICES=${first%%,*}

if [ "${1:-}" != --mps ]; then
    torchrun --standalone --nproc-per-node "${ranks:-2}" -m epdecode.run "$@"
fi
shift
command -v nvidia-cuda-mps-control >/dev/null || refuse "no nvidia-cuda-mps-control on PATH: leave out --mps"
echo "${0##*/}: warning: deepep_ll may hang under MPS, not without (docs/cluster.md)" >&2
# A daemon of our own, so that other users' work on the GPU is not drawn into it.
mps=$(mktemp -d)
export CUDA_MPS_PIPE_DIRECTORY=$mps/pipe CUDA_MPS_LOG_DIRECTORY=$mps/log
mkdir "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
trap 'echo quit | nvidia-cuda-mps-control >/dev/null 2>&1; rm -rf "$mps"' EXIT
# NVSHMEM's barriers want the ranks' shares of the GPU to be 100% together, at most.
export CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=${CUDA_MPS_ACTIVE_THREAD_PERCENTAGE:-$((100 / ${ranks:-2}))}
nvidia-cuda-mps-control -d
code=0
(torchrun --standalone --nproc-per-node "${ranks:-2}" -m epdecode.run "$@") || code=$?
exit "$code"
