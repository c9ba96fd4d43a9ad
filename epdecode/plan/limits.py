"""What DeepEP and DeepGEMM accept: one table, each row with its source.

Versions: DeepEP 1.2.1 (commit 92fe2de and the wheel built from it), DeepGEMM 2.5.0. A row's
``check`` returns what is wrong and the nearest legal value, or None.
"""

from __future__ import annotations

from epdecode.plan.limit_rule import Limit, Request, nearest_of
from epdecode.plan.limits_ht import HT_LIMITS

__all__ = [
    "LIMITS",
    "Limit",
    "Request",
    "low_latency_bytes",
    "qp_depth_needed",
    "violations",
]

LL_HIDDEN = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
LL_MAX_TOP_K = 11
LL_MAX_TOKENS = 1024
LL_MAX_BYTES = 16 * (2**31 - 1)
QP_DEPTH_DEFAULT = 1024
ROUTER_MAX_TOP_K = 32


def _divides(r: Request) -> str | None:
    if r.num_experts % r.ep == 0:
        return None
    below = max(ep for ep in range(1, r.ep) if r.num_experts % ep == 0)
    return f"{r.num_experts} experts do not divide over {r.ep} ranks; nearest rank count: {below}"


def _top_k(r: Request) -> str | None:
    if 1 <= r.top_k <= min(r.num_experts, ROUTER_MAX_TOP_K):
        return None
    most = min(r.num_experts, ROUTER_MAX_TOP_K)
    return f"top-k {r.top_k} of {r.num_experts} experts; accepted: 1 to {most}"


def _groups_of_128(r: Request) -> str | None:
    if r.wire != "fp8" or r.hidden % 128 == 0:
        return None
    return (
        f"hidden {r.hidden} is {r.hidden / 128:g} groups of 128; accepted: a multiple of 128 "
        f"(nearest {round(r.hidden / 128) * 128}), or transport.wire=bf16"
    )


def _ll_hidden(r: Request) -> str | None:
    if r.hidden in LL_HIDDEN:
        return None
    names = ", ".join(map(str, LL_HIDDEN))
    return f"hidden {r.hidden}; compiled for: {names} (nearest {nearest_of(r.hidden, LL_HIDDEN)})"


def _ll_fp8_hidden(r: Request) -> str | None:
    if r.wire != "fp8" or r.hidden % 512 == 0:
        return None
    return f"FP8 dispatch of hidden {r.hidden}; accepted: a multiple of 512"


def _ll_top_k(r: Request) -> str | None:
    if r.top_k <= LL_MAX_TOP_K:
        return None
    return f"top-k {r.top_k}; accepted: at most {LL_MAX_TOP_K}"


def _ll_ranks(r: Request) -> str | None:
    if r.ep < 8 or r.ep % 8 == 0:
        return None
    return f"{r.ep} ranks; accepted: fewer than 8, or a multiple of 8 (nearest {r.ep // 8 * 8})"


def _ll_tokens(r: Request) -> str | None:
    if r.max_tokens <= LL_MAX_TOKENS:
        return None
    return (
        f"max_tokens_per_rank {r.max_tokens}; accepted: at most {LL_MAX_TOKENS} (the finish tag is "
        "1024: more tokens from one rank to one expert would corrupt the count)"
    )


def _ll_capacity(r: Request) -> str | None:
    if (r.ep * r.max_tokens) % 4 == 0:
        return None
    good = next(t for t in range(r.max_tokens, r.max_tokens + 4) if (r.ep * t) % 4 == 0)
    return (
        f"{r.ep} ranks x {r.max_tokens} tokens is no multiple of 4 (TMA alignment of the scales); "
        f"nearest max_tokens_per_rank: {good}"
    )


def _ll_warps(r: Request) -> str | None:
    groups = -(-r.num_experts // r.num_sms)
    if groups < 15 and groups * (32 // groups) >= 12:
        return None
    return (
        f"{r.num_experts} experts on {r.num_sms} SMs need {groups} warp groups; fewer than 15 fit"
    )


def qp_depth_needed(max_tokens: int) -> int:
    """Send-queue entries a low-latency step can have in flight on one queue pair."""
    return max(128, 2 * (max_tokens + 1))


def _ll_qp_depth(r: Request) -> str | None:
    needed = qp_depth_needed(r.max_tokens)
    if r.qp_depth_set is None or r.qp_depth_set >= needed:
        return None
    return (
        f"NVSHMEM_QP_DEPTH={r.qp_depth_set} in the environment; max_tokens_per_rank "
        f"{r.max_tokens} needs at least {needed}: unset it or raise it"
    )


def _ll_bytes(r: Request) -> str | None:
    size = low_latency_bytes(r.max_tokens, r.hidden, r.num_experts)
    if size <= LL_MAX_BYTES:
        return None
    return (
        f"the buffer would take {size / 2**30:.1f} GiB; at most 32 GiB can be addressed: "
        "lower transport.max_tokens_per_rank"
    )


_LL = ("deepep_ll",)
_ALL = ("torch_a2a", "deepep_ll", "deepep_ht")
_LL_SOURCE = "DeepEP 1.2.1 csrc/kernels/internode_ll.cu"

LIMITS: tuple[Limit, ...] = (
    Limit(key="num_experts", transports=_ALL, source="expert placement", check=_divides),
    Limit(key="top_k", transports=_ALL, source="epdecode router", check=_top_k),
    Limit(key="hidden", transports=_ALL, source="FP8 groups of 128", check=_groups_of_128),
    Limit(key="hidden", transports=_LL, source=f"{_LL_SOURCE}, SWITCH_HIDDEN", check=_ll_hidden),
    Limit(key="hidden", transports=_LL, source=_LL_SOURCE, check=_ll_fp8_hidden),
    Limit(key="top_k", transports=_LL, source=_LL_SOURCE, check=_ll_top_k),
    Limit(key="ep", transports=_LL, source="DeepEP 1.2.1 csrc/deep_ep.cpp", check=_ll_ranks),
    Limit(
        key="transport.max_tokens_per_rank",
        transports=_LL,
        source="DeepEP 1.2.1 FINISHED_SUM_TAG",
        check=_ll_tokens,
    ),
    Limit(
        key="transport.max_tokens_per_rank",
        transports=_LL,
        source="DeepEP 1.2.1 csrc/deep_ep.cpp",
        check=_ll_capacity,
    ),
    Limit(key="num_experts", transports=_LL, source=_LL_SOURCE, check=_ll_warps),
    Limit(
        key="NVSHMEM_QP_DEPTH",
        transports=_LL,
        source="DeepEP deep_ep/buffer.py, low_latency_dispatch",
        check=_ll_qp_depth,
    ),
    Limit(
        key="transport.max_tokens_per_rank",
        transports=_LL,
        source="DeepEP 1.2.1 csrc/deep_ep.cpp: rdma bytes / 16 fit an int",
        check=_ll_bytes,
    ),
    *HT_LIMITS,
)


def violations(request: Request) -> list[str]:
    """Every rule the request breaks: ``key: what is wrong (source)``."""
    broken = []
    for limit in LIMITS:
        if request.transport in limit.transports and (wrong := limit.check(request)):
            broken.append(f"{limit.key}: {wrong} [{request.transport}; {limit.source}]")
    return broken


def low_latency_bytes(max_tokens: int, hidden: int, num_experts: int) -> int:
    """RDMA bytes of a low-latency buffer: DeepEP 1.2.1 csrc/config.hpp, LowLatencyLayout.

    Two halves, each a send region, a receive region and a signal region; messages carry the row
    (bfloat16 at most), 16 bytes of source information or one float a group of 128.
    """
    scales = hidden // 128
    dispatch_message = 16 + max(2 * hidden, hidden + 4 * scales)
    combine_message = 2 * hidden + 4 * scales
    send = max(max_tokens * dispatch_message, num_experts * max_tokens * combine_message)
    receive = num_experts * max_tokens * max(dispatch_message, combine_message)
    signals = _align(4 * num_experts, 128)
    # The library adds a whole alignment unit even where the total is aligned.
    return 2 * (send + receive + signals) // 128 * 128 + 128


def _align(value: int, to: int) -> int:
    return -(-value // to) * to
