#!/usr/bin/env bash
# Starts the ranks of this node: of a job of its own, or as one of NNODES nodes.
#   launch/node.sh [--ranks N] [arguments of epdecode.run]          default: one rank per GPU, or 2
# As one of several, set on every node (multinode.sbatch does; a LeaderWorkerSet's own variables count):
#   NNODES     number of nodes
#   MASTER     name or address of the first node, reachable from all
#   RDZV_ID    any text that is this job's alone
#   RDZV_PORT  a port that is free on the first node
#   NODE_RANK  0 on the first node (default: Slurm's or the LeaderWorkerSet's number)
set -euo pipefail
# shellcheck source=launch/common.sh
. "$(dirname "$0")/common.sh"

gpus=$(count_gpus)
[ "$gpus" -gt 0 ] || gpus=2
ranks=${ranks:-$gpus}

nodes=${NNODES:-${LWS_GROUP_SIZE:-1}}
master=${MASTER:-${LWS_LEADER_ADDRESS:-}}
node_rank=${NODE_RANK:-${SLURM_NODEID:-${LWS_WORKER_INDEX:-}}}
if [ "$nodes" -eq 1 ]; then
    torchrun --standalone --nproc-per-node "$ranks" -m epdecode.run "$@"
fi

# The interface towards the first node and this node's address on it. Refuses a loopback address and
# an interface that is not there.
route=$("$python" -m epdecode.launch.route "${master:?several nodes, but MASTER is not set}")
read -r interface address <<<"$route"
# All three pick an interface by themselves, each by its own rule: give them the same one.
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface}
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$interface}
export NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=${NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME:-$interface}
is_host=false
[ "${node_rank:?several nodes, but NODE_RANK is not set}" -ne 0 ] || is_host=true
# is_host: torchrun would compare MASTER with what this host's name resolves to, and where that is a
# loopback address no node would take itself for the first one.
# join_timeout: a node that never comes ends the job after two minutes, not ten.
# local-addr: the ranks meet at this address; torchrun's own choice is the host name.
torchrun --nnodes "$nodes" --nproc-per-node "$ranks" \
    --rdzv-backend c10d --rdzv-id "${RDZV_ID:?}" --rdzv-endpoint "$master:${RDZV_PORT:?}" \
    --rdzv-conf "is_host=$is_host,join_timeout=120" --local-addr "$address" \
    -m epdecode.run "$@"
