"""What DeepEP's high-throughput (normal) kernels accept, and the sizes of their buffers.

Version: DeepEP 1.2.1 (commit 92fe2de and the wheel built from it).
"""

from __future__ import annotations

from dataclasses import dataclass

from epdecode.plan.limit_rule import Limit, Request, nearest_of

NODE_RANKS = 8
"""NVLink peers compiled in; more ranks than that are several nodes of as many."""
INT_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Chunks:
    """Rows in flight of one channel: deep_ep.Config without its SM count."""

    nvl_send: int
    nvl_receive: int
    rdma_send: int
    rdma_receive: int


CHUNKS = {
    2: (Chunks(24, 256, 6, 128), Chunks(10, 256, 6, 128)),
    4: (Chunks(6, 256, 6, 128), Chunks(9, 256, 6, 128)),
    8: (Chunks(6, 256, 6, 128), Chunks(4, 256, 6, 128)),
    16: (Chunks(36, 288, 20, 128), Chunks(4, 288, 12, 128)),
    24: (Chunks(32, 288, 8, 128), Chunks(1, 288, 8, 128)),
    32: (Chunks(32, 288, 8, 128), Chunks(1, 288, 8, 128)),
    48: (Chunks(32, 288, 8, 128), Chunks(1, 288, 8, 128)),
    64: (Chunks(32, 288, 8, 128), Chunks(1, 288, 8, 128)),
    96: (Chunks(20, 480, 12, 128), Chunks(1, 480, 8, 128)),
    128: (Chunks(20, 560, 12, 128), Chunks(1, 560, 8, 128)),
    144: (Chunks(32, 720, 12, 128), Chunks(2, 720, 8, 128)),
    160: (Chunks(28, 720, 12, 128), Chunks(2, 720, 8, 128)),
}
"""Ranks -> (dispatch, combine): DeepEP 1.2.1 deep_ep/buffer.py, get_dispatch_config and
get_combine_config. The GPU run asks the library; this copy is what a plan without it goes by."""

RANKS = tuple(CHUNKS)
ONE_NODE = tuple(ranks for ranks in RANKS if ranks <= NODE_RANKS)

MAX_LOCAL_EXPERTS = 128
"""notify_dispatch on one node has a thread for each local expert."""
ROW_HALF_BYTES = 8192 - 8
"""Half a row and its barrier go through 8 KiB of shared memory a warp."""
_HINT_TOP_K = 128
_HINT_SCALES = 128
_SOURCE_META = 8
_ROW_EXTRAS = _SOURCE_META + _HINT_TOP_K * (8 + 4) + _HINT_SCALES * 4


def hidden_bytes(hidden: int) -> int:
    """Bytes of a row that the hints are asked for: combine sends bfloat16 whatever the wire is."""
    return 2 * hidden


def nvl_bytes(chunks: Chunks, comm_sms: int, row_bytes: int, ranks: int) -> int:
    """NVLink buffer of one config: DeepEP 1.2.1 csrc/config.hpp, get_nvl_buffer_size_hint."""
    nodes, peers = max(1, ranks // NODE_RANKS), min(ranks, NODE_RANKS)
    lanes = comm_sms // 2 * peers
    flags = lanes * (2 * nodes + 3) * 4
    return _align(flags + lanes * chunks.nvl_receive * (row_bytes + _ROW_EXTRAS), 128)


def rdma_bytes(chunks: Chunks, comm_sms: int, row_bytes: int, ranks: int) -> int:
    """RDMA buffer of one config, 0 on one node: csrc/config.hpp, get_rdma_buffer_size_hint."""
    if ranks <= NODE_RANKS:
        return 0
    lanes = comm_sms // 2 * (ranks // NODE_RANKS)
    flags = lanes * (2 * NODE_RANKS + 2) * 2 * 4
    received = _align(chunks.rdma_receive, chunks.rdma_send)
    return _align(flags + lanes * received * (row_bytes + _ROW_EXTRAS + 16) * 2, 128)


def buffer_bytes(hidden: int, ranks: int, comm_sms: int) -> tuple[int, int]:
    """(NVLink, RDMA) bytes: the larger of dispatch and combine."""
    row = hidden_bytes(hidden)
    pair = CHUNKS[ranks]
    return (
        max(nvl_bytes(chunks, comm_sms, row, ranks) for chunks in pair),
        max(rdma_bytes(chunks, comm_sms, row, ranks) for chunks in pair),
    )


def _ranks(r: Request) -> str | None:
    if r.ep in CHUNKS:
        return None
    several = ", ".join(str(ranks) for ranks in RANKS if ranks > NODE_RANKS)
    alone = "; one rank has nobody to send to: transport.name=deepep_ll or torch_a2a"
    return (
        f"{r.ep} rank(s); accepted: 2, 4 or 8 on one node, or {several} on nodes of 8 "
        f"(nearest {nearest_of(r.ep, RANKS)}){alone if r.ep == 1 else ''}"
    )


def _comm_sms(r: Request) -> str | None:
    if r.comm_sms % 2 == 0 and r.comm_sms <= r.num_sms:
        return None
    near = min(r.comm_sms + r.comm_sms % 2, r.num_sms // 2 * 2)
    return f"{r.comm_sms}; accepted: even numbers from 2 to {r.num_sms} (nearest {near})"


def _local_experts(r: Request) -> str | None:
    local = r.num_experts // r.ep
    if r.ep not in ONE_NODE or local <= MAX_LOCAL_EXPERTS:
        return None
    enough = next((n for n in ONE_NODE if r.num_experts // n <= MAX_LOCAL_EXPERTS), NODE_RANKS)
    return (
        f"{local} experts a rank; accepted: at most {MAX_LOCAL_EXPERTS} "
        f"(nearest rank count: {enough})"
    )


def _row(r: Request) -> str | None:
    """A dispatched row, halved, goes through shared memory; a combined one is bfloat16."""
    size = r.hidden if r.wire == "fp8" else 2 * r.hidden
    unit = 256 if r.ep > NODE_RANKS else 16 if r.wire == "bf16" else 32
    most = 2 * ROW_HALF_BYTES // (size // r.hidden) // unit * unit
    if r.hidden % unit == 0 and r.hidden <= most:
        return None
    near = min(max(unit, round(r.hidden / unit) * unit), most)
    return (
        f"hidden {r.hidden} on a {r.wire} wire; accepted: multiples of {unit} up to {most} "
        f"(nearest {near})"
    )


def _buffers(r: Request) -> str | None:
    if r.ep not in CHUNKS or r.ep <= NODE_RANKS:
        return None
    largest = max(buffer_bytes(r.hidden, r.ep, r.comm_sms))
    if largest <= INT_MAX:
        return None
    return (
        f"the buffer would take {largest / 2**30:.2f} GiB; at most 2 GiB can be addressed across "
        "nodes: lower transport.num_sms"
    )


_HT = ("deepep_ht",)
_INTRANODE = "DeepEP 1.2.1 csrc/kernels/intranode.cu"

HT_LIMITS: tuple[Limit, ...] = (
    Limit(
        key="ep",
        transports=_HT,
        source="DeepEP 1.2.1 deep_ep/buffer.py, get_dispatch_config",
        check=_ranks,
    ),
    Limit(
        key="transport.num_sms",
        transports=_HT,
        source="DeepEP 1.2.1 deep_ep/buffer.py, set_num_sms",
        check=_comm_sms,
    ),
    Limit(
        key="num_experts",
        transports=_HT,
        source=f"{_INTRANODE}, notify_dispatch",
        check=_local_experts,
    ),
    Limit(
        key="hidden",
        transports=_HT,
        source=f"{_INTRANODE} and internode.cu, TMA copies of rows",
        check=_row,
    ),
    Limit(
        key="transport.num_sms",
        transports=_HT,
        source="DeepEP 1.2.1 csrc/deep_ep.cpp: buffer sizes fit an int",
        check=_buffers,
    ),
)


def _align(value: int, to: int) -> int:
    return -(-value // to) * to
