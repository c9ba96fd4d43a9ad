"""A result document with every field filled, to be varied by tests."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from epdecode.result import (
    STAGES,
    ExpertLoad,
    Floor,
    MemoryUse,
    Method,
    Provenance,
    RankPlace,
    Result,
    StepCounts,
    Verification,
)
from epdecode.result.timing import build_throughput, build_timing

METHOD = Method(
    world_size=4,
    layers=6,
    tokens_per_rank=128,
    transport="deepep_ll",
    wire="fp8",
    experts="deepgemm",
    graph=True,
    warmup_steps=10,
    steps=50,
    clock="cuda_event",
    cache="cold",
    shared_gpu=False,
)


def make_result(**changes: Any) -> Result:
    """A passed run of 4 ranks; ``changes`` replace fields of Result."""
    rng = random.Random(7)
    plain = {rank: [2400 + 40 * rank + rng.gauss(0, 15) for _ in range(50)] for rank in range(4)}
    stages = {
        rank: {
            stage: [20 + 10 * index + rng.random() for _ in range(50)]
            for index, stage in enumerate(STAGES)
        }
        for rank in range(4)
    }
    timing = build_timing(plain, METHOD.layers, instrumented=plain, stages=stages)
    result = Result(
        status="passed",
        name="deepseek_v3-h200-deepep_ll",
        config={"model": "deepseek-v3", "layers": 6, "batch": {"buckets": [1, 128]}},
        config_digest="0123456789abcdef",
        plan={"local_experts": 64, "buffer_bytes": 1908410496},
        provenance=Provenance(
            epdecode="0.1.0",
            commit="1234567",
            versions={"torch": "2.11.0+cu130", "deep_ep": None},
            gpu="NVIDIA H200",
            ranks=tuple(
                RankPlace(rank=rank, host="node1", pid=100 + rank, device=f"cuda:{rank}")
                for rank in range(4)
            ),
            command=("python", "-m", "epdecode.run"),
            started_utc="2026-01-31T12:00:00Z",
            finished_utc="2026-01-31T12:01:00Z",
        ),
        method=METHOD,
        timing=timing,
        first_call_us=104_000.0,
        throughput=build_throughput(512, timing),
        layer_floor=Floor(bytes=1_409_286_144, flops=90_000_000, floor_us=323.2, fraction=0.78),
        floors={"gate_up_gemm": Floor(bytes=939_524_096, flops=1, floor_us=45.4, fraction=0.9)},
        expert_load=ExpertLoad(max=31, mean=16, imbalance=31 / 16, rank_imbalance=1.04),
        memory={
            "weights": MemoryUse(planned=8_455_716_864, peak=8_455_716_864),
            "total": MemoryUse(planned=10_455_716_864, peak=10_300_000_000),
        },
        step_counts=StepCounts(graph=50, eager=0, skipped=0),
        verification=Verification(
            passed=True,
            rows=512,
            worst_row=17,
            worst_error=0.043,
            tolerance=0.08,
            reference="torch_a2a + torch_loop, float32",
            worst_rank=2,
        ),
    )
    return replace(result, **changes)
