#!/usr/bin/env bash
# Sets up what is missing, then runs the main job on this machine under torchrun.
#   scripts/run.sh [--ranks N] [arguments of epdecode.run, e.g. --config X run.steps=50]
# Without --config: the GPU preset with one rank per GPU where GPU and libraries are there, else
# configs/cpu-tiny.yaml with 2 ranks. The last line on stdout is the job's JSON line, and the exit
# code is the job's own (torchrun alone would turn every failure into 1).
set -euo pipefail
cd "$(dirname "$0")/.."

ranks=
if [ "${1:-}" = --ranks ]; then
    ranks=${2:?--ranks needs a number}
    shift 2
fi
python=$(bash scripts/setup.sh)

config=configs/cpu-tiny.yaml
if command -v nvidia-smi >/dev/null 2>&1; then
    gpus=$("$python" -c 'import deep_ep, deep_gemm, torch; print(torch.cuda.device_count())' 2>/dev/null) ||
        gpus=0
    if [ "$gpus" -gt 0 ]; then
        config=configs/deepseek_v3-h200-deepep_ll.yaml
        ranks=${ranks:-$gpus}
    else
        echo "run: no GPU that deep_ep and deep_gemm can use (epdecode doctor says why): CPU preset" >&2
    fi
fi
case " $* " in
*" --config "* | *" --config="*) ;;
*) set -- --config "$config" "$@" ;;
esac
# One thread a rank: torchrun's own choice too, made here so that it need not warn.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

lines=$(mktemp)
trap 'rm -f "$lines"' EXIT
# Job control gives torchrun a process group and default signals, so that a forwarded one counts.
set -m
"$python" -m torch.distributed.run --standalone --nproc-per-node "${ranks:-2}" \
    -m epdecode.run "$@" > >(tee -i "$lines") &
job=$!
trap 'kill -TERM "$job" 2>/dev/null || true' TERM
trap 'kill -INT "$job" 2>/dev/null || true' INT
code=0
wait "$job" || code=$?
# A trapped signal ends `wait` early; the job is still closing down then.
while kill -0 "$job" 2>/dev/null; do
    code=0
    wait "$job" || code=$?
done
[ "$code" -ne 0 ] || exit 0
exit "$("$python" scripts/exit_code.py "$lines" "$code")"
