"""The known lines. Order matters: the first pattern that matches a line names it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cause:
    """One kind of line: a regular expression, what is behind it and what to do."""

    id: str
    pattern: str
    cause: str
    remedy: str
    one_node_harmless: bool = False
    """Only RDMA is affected, and one NVLink node uses none."""
    consequence: bool = False
    """Follows from another fault; never the first thing to mend."""


_NVSHMEM = (
    Cause(
        "peermem",
        r"(?i)(neither|no|not|missing|fail)\b.*(nv_peer_mem|peermem)|peermem.*(not|missing|fail)",
        "the NIC cannot reach GPU memory: nvidia_peermem is not loaded and dmabuf is not used",
        "modprobe nvidia_peermem on the host, or the open kernel modules with dmabuf",
        one_node_harmless=True,
    ),
    Cause(
        "uar",
        r"(?i)(allocat|creat|fail|unable|cannot).*\buar\b|(\b|_)uar\b.*(fail|alloc)",
        "no permission or no room to map the NIC's doorbell pages (UAR) into the GPU",
        "run with access to /dev/infiniband and DEVX (container: --device=/dev/infiniband "
        "--cap-add=IPC_LOCK), driver option PeerMappingOverride=1, or "
        "NVSHMEM_IBGDA_NIC_HANDLER=cpu with GDRCopy",
        one_node_harmless=True,
    ),
    Cause(
        "address_handle",
        r"(?i)(creat|fail|unable|cannot).*(\bAH\b|address handle)|ibv_create_ah",
        "no path to the peer's NIC: on RoCE most often the wrong GID index",
        "set NVSHMEM_IB_GID_INDEX (and NCCL_IB_GID_INDEX) to the RoCE v2 entry that `show_gids` "
        "lists on every node",
        one_node_harmless=True,
    ),
    Cause(
        "teams",
        r"(?i)no more teams|MAX_TEAMS|team.*(exhaust|limit)",
        "more NVSHMEM teams than were provided for; DeepEP sets NVSHMEM_MAX_TEAMS=7",
        "take the NVSHMEM version that the wheel set names (docs/dependencies.md), and initialise "
        "no other NVSHMEM user first",
    ),
    Cause(
        "mps",
        r"(?i)\bMPG\b|(PEs?|processes).*shar.*GPU|requires? MPS",
        "several ranks share a GPU without the MPS daemon; NVSHMEM's barriers then refuse",
        "launch/shared_gpu.sh --mps, or one rank per GPU, or run.align: none",
    ),
    Cause(
        "nvshmem_version",
        r"(?i)nvshmem.*version.*(mismatch|does not match|incompatib)",
        "NVSHMEM's host library and the device code inside deep_ep are of different versions",
        "take one wheel set as a whole (docs/dependencies.md); no second NVSHMEM on "
        "LD_LIBRARY_PATH",
    ),
    Cause(
        "rc_per_pe",
        r"num_rc_per_pe",
        "NVSHMEM was started with fewer queue pairs per peer than local experts",
        "let epdecode start it, or set NVSHMEM_IBGDA_NUM_RC_PER_PE before the first "
        "initialisation in the process",
    ),
    Cause(
        "ibgda",
        r"(?i)init failed for transport:? *IBGDA|ibgda.*(fail|not supported|no device)",
        "GPU-driven RDMA (IBGDA) did not come up; DeepEP needs it between nodes",
        "driver options NVreg_EnableStreamMemOPs=1 and PeerMappingOverride=1, mlx5 NICs, "
        "nvidia_peermem; `epdecode doctor --nodes 2` checks each",
        one_node_harmless=True,
    ),
    Cause(
        "no_hca",
        r"(?i)no (active |usable )?(HCA|IB device|mlx5|RDMA device)|unable to find.*(HCA|device)"
        r"|ibv_get_device_list.*(fail|no)",
        "no usable RDMA device",
        "pass /dev/infiniband into the container; NVSHMEM_HCA_PREFIX for devices not named mlx5",
        one_node_harmless=True,
    ),
    Cause(
        "nvshmem_bootstrap",
        r"(?i)nvshmem.*bootstrap.*(fail|time|error)|bootstrap_uid",
        "the ranks' NVSHMEM processes do not reach each other over TCP",
        "set NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME to the interface that the nodes share",
    ),
    Cause(
        "heap",
        r"(?i)(symmetric heap|nvshmem).*(out of memory|alloc\w* fail)|cuMemCreate.*fail",
        "the symmetric buffer does not fit into GPU memory",
        "lower transport.max_tokens_per_rank or end what else uses the GPU; `epdecode plan` "
        "shows the bytes",
    ),
)

_NCCL = (
    Cause(
        "duplicate_gpu",
        r"Duplicate GPU detected",
        "NCCL was asked for two ranks on one GPU",
        "one rank per GPU, or a config whose data plane is not NCCL",
    ),
    Cause(
        "memlock",
        r"(?i)ibv_(create_cq|reg_mr|create_qp)\w*.*(Cannot allocate memory|ENOMEM)",
        "the memlock limit keeps RDMA from pinning memory",
        "ulimit -l unlimited (docker --ulimit memlock=-1; LimitMEMLOCK=infinity for slurmd)",
    ),
    Cause(
        "socket_interface",
        r"(?i)no socket interface found|Unable to find address for|no such interface",
        "the named network interface does not exist on this node",
        "set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to an interface that `ip -brief address` "
        "lists on every node",
    ),
    Cause(
        "nccl_connect",
        r"(?i)NCCL WARN.*(connect to|Connect).*(refused|timed out|No route)",
        "NCCL's ranks do not reach each other over the chosen interface",
        "set NCCL_SOCKET_IFNAME to the shared network and open its ports between the nodes",
    ),
    Cause(
        "nccl_peer",
        r"(?i)Watchdog caught collective operation timeout|NCCL.*(unhandled system error|remote "
        r"process (exited|has))",
        "a peer stopped answering",
        "look at the other ranks' logs for an earlier fault",
        consequence=True,
    ),
)

_LAUNCH = (
    Cause(
        "port",
        r"(?i)address already in use|EADDRINUSE",
        "the rendezvous port is taken, often by an earlier run that is still ending",
        "torchrun --standalone on one node; another --rdzv-endpoint port across nodes",
    ),
    Cause(
        "loopback",
        r"(?i)connect\w*.*\b(127\.\d+\.\d+\.\d+|localhost)\b.*(refused|fail|timed out)"
        r"|(refused|fail|timed out).*\b(127\.\d+\.\d+\.\d+|localhost)\b",
        "a rank was told a loopback address, which on another node is that node itself",
        "set MASTER_ADDR to the first node's address and GLOO_SOCKET_IFNAME to the shared network",
    ),
    Cause(
        "gloo_mesh",
        r"(?i)connectFullMesh|gloo.*connect.*(fail|timed? ?out)",
        "gloo's ranks do not reach each other",
        "set GLOO_SOCKET_IFNAME to the interface that the nodes share",
    ),
    Cause(
        "rendezvous",
        r"(?i)Rendezvous\w*(Timeout|Connection|Closed)\w*|rendezvous.*timed out"
        r"|client socket has timed out",
        "not every node reached the rendezvous in time",
        "same --rdzv-id and --rdzv-endpoint on all nodes, the first node's address, an open port",
    ),
    Cause(
        "rank_unset",
        r"environment variable (RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT) expected",
        "the process was not started by torchrun",
        "torchrun --nproc-per-node N -m epdecode.run --config X",
    ),
    Cause(
        "library",
        r"cannot open shared object file|undefined symbol",
        "a shared library is missing or was built for another torch",
        "`epdecode doctor` names the wheel set that fits",
    ),
    Cause(
        "ordinal",
        r"(?i)invalid device ordinal",
        "a rank asked for a GPU that it cannot see",
        "as many ranks as GPUs; CUDA_VISIBLE_DEVICES the same on all ranks of a node",
    ),
    Cause(
        "no_kernel_image",
        r"(?i)no kernel image is available",
        "a library was not compiled for this GPU",
        "DeepEP and DeepGEMM run on compute capability 9.0 and 10.x",
    ),
    Cause(
        "gpu_memory",
        r"(?i)CUDA out of memory|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation",
        "GPU memory ran out",
        "`epdecode plan` shows what a rank takes; lower layers or transport.max_tokens_per_rank",
    ),
    Cause(
        "host_memory",
        r"(?i)oom-kill|Out of memory: Killed|exitcode\s*:\s*-9|signal 9|SIGKILL",
        "a process was killed, most often by the kernel or Slurm for using too much host memory",
        "see `dmesg` or `sacct`; ask for more memory with --mem",
    ),
    Cause(
        "deep_ep_timeout",
        r"(?i)DeepEP.*time ?out|dispatch CPU timeout",
        "DeepEP waited 100 s for a peer",
        "look at the other ranks' logs for an earlier fault",
        consequence=True,
    ),
    Cause(
        "child_failed",
        r"ChildFailedError|Root Cause \(first observed failure\)",
        "torchrun names the first process it saw end, often a victim",
        "status.json of the run and the ranks' own logs name the cause",
        consequence=True,
    ),
    Cause(
        "cuda",
        r"(?i)CUDA error|device-side assert|unspecified launch failure|illegal memory access",
        "a kernel failed; the line that reports it is often far from the one that caused it",
        "look for the first fault above it; CUDA_LAUNCH_BLOCKING=1 to find the kernel",
        consequence=True,
    ),
)

CAUSES = _NVSHMEM + _NCCL + _LAUNCH
