"""What every transport refuses before it sends anything."""

from __future__ import annotations

import torch

from epdecode.batch import Route
from epdecode.errors import UserError
from epdecode.plan import Plan


def check_dispatch(x: torch.Tensor, route: Route, plan: Plan) -> None:
    """Shapes and dtypes of a dispatch; host-side only, nothing waits for the device.

    Raises UserError: more rows than max_tokens_per_rank, a wrong shape, or a wrong dtype.
    """
    tokens, hidden = x.shape
    if tokens > plan.max_tokens:
        raise UserError(
            f"dispatch of {tokens} tokens; transport.max_tokens_per_rank is {plan.max_tokens}"
        )
    if hidden != plan.model.hidden:
        raise UserError(f"dispatch of rows of {hidden}; the model's hidden is {plan.model.hidden}")
    if x.dtype != torch.bfloat16 and plan.transport.name != "torch_a2a":
        raise UserError(f"dispatch of {x.dtype}; {plan.transport.name} takes torch.bfloat16")
    expected = (tokens, plan.model.top_k)
    for name, tensor, dtype in (
        ("topk_ids", route.topk_ids, torch.int64),
        ("topk_weights", route.topk_weights, torch.float32),
    ):
        if tuple(tensor.shape) != expected or tensor.dtype != dtype:
            raise UserError(
                f"{name}: got {tensor.dtype} {tuple(tensor.shape)}; accepted: {dtype} {expected} "
                "(epdecode.make_route converts)"
            )
