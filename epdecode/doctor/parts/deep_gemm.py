"""One masked grouped GEMM of DeepGEMM: compiles on this node, and gives the exact product."""

from __future__ import annotations

import importlib
import time

import torch

from epdecode.doctor.check import Outcome, fail, ok
from epdecode.world import World

EXPERTS, ROWS, K, N = 2, 64, 512, 256
COUNTS = (64, 5)


def operands(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """+1 and -1 in float32, [EXPERTS, ROWS, K] and [EXPERTS, N, K]: exact in FP8 and in the sum."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(0, 2, (EXPERTS, ROWS, K), generator=generator).mul(2).sub(1).float()
    b = torch.randint(0, 2, (EXPERTS, N, K), generator=generator).mul(2).sub(1).float()
    return a.to(device), b.to(device)


def check(world: World) -> Outcome:
    """Against a float32 product; rows past the count are not looked at."""
    deep_gemm = importlib.import_module("deep_gemm")
    a, b = operands(world.device)
    # [EXPERTS, ROWS, K/128], rows contiguous, as DeepGEMM reads it on Hopper.
    a_scales = torch.ones(EXPERTS, K // 128, ROWS, device=world.device).transpose(1, 2)
    b_scales = torch.ones(EXPERTS, N // 128, K // 128, device=world.device)
    out = torch.empty(EXPERTS, ROWS, N, dtype=torch.bfloat16, device=world.device)
    start = time.perf_counter()
    deep_gemm.m_grouped_fp8_gemm_nt_masked(
        (a.to(torch.float8_e4m3fn), a_scales),
        (b.to(torch.float8_e4m3fn), b_scales),
        out,
        torch.tensor(COUNTS, dtype=torch.int32, device=world.device),
        sum(COUNTS) // EXPERTS,
    )
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    expected = torch.bmm(a.double(), b.double().transpose(1, 2))
    for expert, count in enumerate(COUNTS):
        if not torch.equal(out[expert, :count].double(), expected[expert, :count]):
            return fail(
                f"rank {world.rank}: expert {expert} differs from the exact product",
                "equal values",
                "empty the kernel cache (DG_JIT_CACHE_DIR) and try again; then report it",
            )
    return ok(f"masked grouped GEMM exact; first call with compilation {seconds:.1f} s")
