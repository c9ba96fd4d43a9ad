"""Scaled routed output + shared expert, and router weights applied once, against plain sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from epdecode.batch import (
    Batch,
    ExpertWeights,
    LayerEnd,
    MaskedBatch,
    PackedBatch,
    Pending,
    Route,
    no_mark,
)
from epdecode.build import Runtime, build
from epdecode.graphs import StepBatch, fill
from epdecode.layer import MoELayer
from epdecode.plan import Plan, make_plan
from epdecode.router import PLAIN, GateRouter, make_route, rule_of
from epdecode.shared import NoSharedExpert, SerialLane
from epdecode.transport import build_transport
from epdecode.verify import row_errors
from epdecode.world import World
from tests.fakes import deep_ep as fake_deep_ep
from tests.fakes import deep_ep_ht as fake_deep_ep_ht
from tests.ranks import run_ranks
from tests.small import ll_model, plain_router, small_config, small_model
from tests.transport.packed import values

BF16 = ["transport.wire=bf16", "weights.format=bf16"]


def expert(x: torch.Tensor, weights: ExpertWeights, slot: int) -> torch.Tensor:
    """One SwiGLU in float64."""
    gate, up = (x @ weights.gate_up[slot].double().T).chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * up) @ weights.down[slot].double().T


def written_out(runtime: Runtime, hidden: torch.Tensor, rank: int) -> torch.Tensor:
    """One layer as the paper writes it, from the weights of a world of one: float64 [T, H]."""
    weights, router = runtime.weights[0], runtime.plan.model.router
    x = hidden.double()
    x = x / (x.square().mean(1, keepdim=True) + 1e-6).sqrt() * weights.norm.double()
    x = x.to(torch.bfloat16).double()
    scores = torch.sigmoid(x @ weights.gate.double().T)
    out = torch.zeros_like(x)
    for token in range(x.shape[0]):
        biased = scores[token] + weights.bias.double()
        groups = biased.view(router.n_group, -1).topk(2).values.sum(1).topk(router.topk_group)
        allowed = torch.zeros_like(biased).view(router.n_group, -1)
        allowed[groups.indices] = 1
        chosen = biased.masked_fill(allowed.flatten() == 0, -torch.inf).topk(2).indices
        share = scores[token, chosen] / scores[token, chosen].sum()
        for one, part in zip(chosen.tolist(), share.tolist(), strict=True):
            done = expert(x[token : token + 1], weights.experts, one)[0]
            out[token] += router.routed_scaling_factor * part * done
    assert weights.shared is not None
    return out + expert(x, weights.shared, 0)


def hidden_of(rank: int, hidden: int) -> torch.Tensor:
    gen = torch.Generator().manual_seed(rank)
    return torch.randn([5, 0, 7, 1][rank], hidden, generator=gen).to(torch.bfloat16)


def added(world: World, overrides: list[str]) -> torch.Tensor:
    """What the first layer adds to this rank's tokens."""
    config, model = small_config(*BF16, "layers=1", *overrides), small_model()
    runtime = build(config, make_plan(config, model, world.size), world)
    hidden = hidden_of(world.rank, model.hidden)
    fill(runtime.inputs, StepBatch(hidden), 16)
    out = runtime.step()(16).traces[0].out[: hidden.shape[0]].clone()
    runtime.close()
    return out


def expected(world: World) -> list[torch.Tensor]:
    config, model = small_config(*BF16, "layers=1"), small_model()
    runtime = build(config, make_plan(config, model, 1), world)
    made = [written_out(runtime, hidden_of(rank, model.hidden), rank) for rank in range(4)]
    runtime.close()
    return made


@pytest.mark.parametrize("layout", ["masked", "packed"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_scaled_routed_output_plus_shared_expert(size: int, layout: str) -> None:
    wanted = run_ranks(1, expected)[0]
    results = run_ranks(size, added, [f"transport.layout={layout}"])
    for rank, out in enumerate(results):
        assert (row_errors(out, wanted[rank]) < 2**-6).all()


def test_the_switch_of_the_overlap_changes_nothing() -> None:
    for on, off in zip(
        run_ranks(2, added, ["overlap.shared_expert=true"]),
        run_ranks(2, added, ["overlap.shared_expert=false"]),
        strict=True,
    ):
        assert torch.equal(on, off)


class Recorder:
    """Stands for every part of a layer and notes in which order they are called."""

    def __init__(self, aside: bool = True) -> None:
        self.calls: list[str] = []
        self.apart: list[bool] = []
        self.aside = aside

    def note(self, name: str, value: object = None) -> object:
        self.calls.append(name)
        return value

    def dispatch(self, x: torch.Tensor, route: Route, apart: bool) -> Pending[Batch]:
        self.note("dispatch")
        self.apart.append(apart)
        batch = MaskedBatch(x[None], torch.tensor([x.shape[0]]), 1)
        return Pending(lambda: self.note("arrived", batch))  # type: ignore[arg-type, return-value]

    def combine(
        self, rows: torch.Tensor, batch: Batch, route: Route, apart: bool
    ) -> Pending[torch.Tensor]:
        self.note("combine")
        self.apart.append(apart)
        return Pending(lambda: self.note("returned", rows[0]))  # type: ignore[arg-type, return-value]

    def start(self, normed: torch.Tensor, num_tokens: torch.Tensor) -> None:
        self.note("shared started")

    def join(self) -> torch.Tensor:
        self.note("shared joined")
        return torch.ones(2, 4)


def layer_of(parts: Recorder) -> MoELayer:
    return MoELayer(
        norm=lambda hidden: hidden,
        router=lambda normed, num_tokens: Route(torch.zeros(2, 1), torch.ones(2, 1)),
        transport=parts,
        experts=lambda batch, weights, mark: batch.rows,
        weights=None,
        shared=parts,
        end=lambda hidden, routed, shared: LayerEnd(routed + shared, hidden, hidden),
    )


INPUTS = (torch.zeros(2, 4), torch.zeros(2, 4), torch.tensor([2]))


@pytest.mark.parametrize(
    ("aside", "marked", "apart"),
    [(True, False, True), (False, True, True), (True, True, True), (False, False, False)],
)
def test_send_and_receive_are_apart_where_something_is_done_or_timed_between(
    aside: bool, marked: bool, apart: bool
) -> None:
    parts = Recorder(aside)
    layer_of(parts)(*INPUTS, parts.note if marked else no_mark)
    assert parts.apart == [apart, apart]


def test_the_shared_expert_starts_while_dispatch_waits_and_is_added_last() -> None:
    parts = Recorder()
    end, trace = layer_of(parts)(*INPUTS, no_mark)
    assert parts.calls == [
        "dispatch", "shared started", "arrived", "combine", "returned", "shared joined"
    ]  # fmt: skip
    assert (end.out == 1).all()
    assert trace.out is end.out


def test_a_model_without_shared_experts_adds_nothing() -> None:
    routed = torch.randn(3, 4)
    nothing = NoSharedExpert()
    nothing.start(routed, torch.tensor([3]))
    assert nothing.join() is None


def test_work_in_line_is_done_at_once() -> None:
    done: list[int] = []
    lane = SerialLane()
    lane.run(lambda: done.append(1))
    assert done == [1]
    lane.join()


MEMBERS = [
    ("torch_a2a", "masked", 1),
    ("torch_a2a", "masked", 2),
    ("torch_a2a", "packed", 1),
    ("torch_a2a", "packed", 2),
    ("deepep_ll", "masked", 1),
    ("deepep_ll", "masked", 2),
    ("deepep_ht", "packed", 2),
]


def member_plan(name: str, layout: str, size: int) -> Plan:
    config = small_config(
        f"transport.name={name}", f"transport.layout={layout}", "transport.wire=bf16",
        "transport.max_tokens_per_rank=8", "batch.tokens_per_rank=8", "batch.buckets=[8]",
    )  # fmt: skip
    return make_plan(config, ll_model(router=plain_router()), size)


def identity(
    world: World, plan: Plan, routes: list[tuple[list[list[int]], list[list[float]]]]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(x, what comes back) for each route, through experts that change nothing."""
    fakes: dict[str, Callable[[], object]] = {
        "deepep_ll": fake_deep_ep.install,
        "deepep_ht": fake_deep_ep_ht.install,
    }
    fakes.get(plan.transport.name, lambda: None)()
    transport = build_transport(plan, world)
    made = []
    for ids, weights in routes:
        x = torch.randn(len(ids), plan.model.hidden).to(torch.bfloat16)
        route = make_route(torch.tensor(ids), torch.tensor(weights), plan.num_experts)
        batch = transport.dispatch(x, route).wait()
        plain = values(batch) if isinstance(batch, PackedBatch) else batch.rows
        rows = torch.nan_to_num(plain.float()).to(torch.bfloat16)
        made.append((x, transport.combine(rows, batch, route).wait().clone()))
    transport.close()
    return made


@pytest.mark.parametrize(("name", "layout", "size"), MEMBERS)
def test_router_weights_are_applied_once_on_every_transport(
    name: str, layout: str, size: int
) -> None:
    """Weights .75 and .25, then 2 and 2; divided by their sum or not; times 2.5 or not."""
    ids, factors, routes = [[0, 7], [5, 2]], [], []
    for scores in ([0.75, 0.25], [2.0, 2.0]):
        for norm in (False, True):
            for factor in (1.0, 2.5):
                weights = [one / (sum(scores) if norm else 1) * factor for one in scores]
                routes.append((ids, [weights] * 2))
                factors.append(factor * (1 if norm else sum(scores)))
    assert sorted(set(factors)) == [1.0, 2.5, 4.0, 10.0]
    for results in run_ranks(size, identity, member_plan(name, layout, size), routes):
        for (x, out), factor in zip(results, factors, strict=True):
            assert (row_errors(out, x.float() * factor) <= 2**-7).all()


@pytest.mark.parametrize("factor", [1.0, 2.5])
@pytest.mark.parametrize(("norm", "total"), [(False, 0.8), (True, 1.0)])
def test_the_gate_scales_whether_it_divides_or_not(norm: bool, total: float, factor: float) -> None:
    """Softmax of .6, .2 and .2 to others: the two chosen sum to .8 unless they are divided."""
    router = plain_router(norm_topk_prob=norm, routed_scaling_factor=factor)
    model = small_model(num_experts=4, router=router)
    logits = torch.tensor([[0.6, 0.2, 0.19999, 1e-5]]).log()
    ops = replace(PLAIN, logits=lambda normed, gate: logits)
    gate = GateRouter(torch.zeros(4, 4, dtype=torch.bfloat16), None, rule_of(model), ops)
    route = gate(torch.zeros(1, 4, dtype=torch.bfloat16), torch.tensor([1], dtype=torch.int32))
    assert route.topk_ids.tolist() == [[0, 1]]
    expected_weights = torch.tensor([[0.6, 0.2]]) / (0.8 if norm else 1) * factor
    torch.testing.assert_close(route.topk_weights, expected_weights)
    assert float(route.topk_weights.sum()) == pytest.approx(total * factor)
