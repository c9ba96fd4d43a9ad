"""What other numbers of redundant experts would do: to the imbalance, the buffer and the memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from epdecode.config import Config
from epdecode.errors import ConfigError
from epdecode.plan import Plan
from epdecode.plan.placement import redundant_problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One placement. refused: why there is no plan for it; the figures are then None."""

    placement: str
    redundant: int
    slots_per_rank: int | None = None
    rank_imbalance: float | None = None
    """Expected: rows of the busiest rank over the mean."""
    buffer_bytes: int | None = None
    num_qps: int | None = None
    memory_bytes: int | None = None
    refused: str = ""


def usual_counts(num_experts: int, num_ranks: int, configured: int) -> list[int]:
    """None, one, two and four replicas a rank, and what the config has; those that are possible."""
    spare = -num_experts % num_ranks
    counts = sorted({spare, *(spare + num_ranks * each for each in (1, 2, 4)), configured})
    return [count for count in counts if redundant_problem(num_experts, count, num_ranks) is None]


def study(
    config: Config, plan_for: Callable[[Config], Plan], counts: Sequence[int]
) -> list[Choice]:
    """Contiguous first, then balanced with each number of replicas. plan_for: make_plan with all
    but the config given."""
    kind = config.experts.placement
    contiguous = replace(config.experts, placement="contiguous", redundant=0, load=None)
    choices = [_choice(replace(config, experts=contiguous), plan_for)]
    for count in counts:
        placement = "balanced" if kind == "contiguous" else kind
        experts = replace(config.experts, placement=placement, redundant=count)
        choices.append(_choice(replace(config, experts=experts), plan_for))
    return choices


def _choice(config: Config, plan_for: Callable[[Config], Plan]) -> Choice:
    name, redundant = config.experts.placement, config.experts.redundant
    try:
        plan = plan_for(config)
    except ConfigError as error:
        return Choice(placement=name, redundant=redundant, refused=str(error).partition("\n")[0])
    return Choice(
        placement=name,
        redundant=redundant,
        slots_per_rank=plan.num_local_experts,
        rank_imbalance=plan.placement.rank_imbalance,
        buffer_bytes=plan.transport.rdma_bytes + plan.transport.nvl_bytes,
        num_qps=plan.transport.num_qps,
        memory_bytes=plan.memory_bytes,
    )


def render_study(choices: Sequence[Choice], load: str) -> str:
    """An aligned table."""
    lines = [
        f"placements, for the load of {load}",
        f"  {'placement':<18}{'redundant':>10}{'slots/rank':>12}{'rank imbalance':>16}"
        f"{'buffer GiB':>12}{'QPs':>6}{'memory GiB':>12}",
    ]
    for choice in choices:
        head = f"  {choice.placement:<18}{choice.redundant:>10}"
        if choice.refused:
            lines.append(f"{head}  refused: {choice.refused[:100]}")
            continue
        buffer, memory = (
            (size or 0) / (1 << 30) for size in (choice.buffer_bytes, choice.memory_bytes)
        )
        lines.append(
            f"{head}{choice.slots_per_rank:>12}{choice.rank_imbalance:>16.3f}{buffer:>12.2f}"
            f"{choice.num_qps:>6}{memory:>12.2f}"
        )
    return "\n".join(lines)
