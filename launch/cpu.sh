#!/usr/bin/env bash
# The job on CPUs of one machine, over gloo.
#   launch/cpu.sh [--ranks N] [arguments of epdecode.run]      default: 2 ranks, configs/cpu-tiny.yaml
set -euo pipefail
# shellcheck source=launch/common.sh
. "$(dirname "$0")/common.sh"

# A GPU that happens to be here stays out of it.
export CUDA_VISIBLE_DEVICES=
torchrun --standalone --nproc-per-node "${ranks:-2}" -m epdecode.run "$@"
