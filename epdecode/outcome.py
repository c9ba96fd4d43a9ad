"""One rank's samples -> the run's Result, with every rank's figures in it. Collective."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

import torch

from epdecode.build import Runtime
from epdecode.expert_load import Received, gather_load
from epdecode.loop import Timed
from epdecode.padding import packed_rows_use
from epdecode.plan import Plan, to_json
from epdecode.plan.floors import Traffic, stage_floors, weight_floor_us
from epdecode.provenance import loaded_versions, make_provenance
from epdecode.result import (
    Cause,
    Floor,
    MemoryUse,
    Method,
    NonFinite,
    Result,
    RunStatus,
    StepCounts,
    Timing,
    Verification,
    WeightsUse,
)
from epdecode.result.document import withhold_speed
from epdecode.result.save import utc_now
from epdecode.result.timing import build_throughput, build_timing, slow_ranks
from epdecode.session import Setup
from epdecode.world import World


@dataclass(frozen=True, slots=True)
class Measured:
    """What one rank brings home from the loop."""

    timed: Timed
    kind: str
    """eager or graph, as the steps really ran."""
    first_call_us: float
    verification: Verification | None


def blank_result(name: str, setup: Setup, world: World, started_utc: str) -> Result:
    """The document without figures: what a run that breaks is reported in. Collective."""
    return Result(
        status="failed",
        name=name,
        config=asdict(setup.config),
        config_digest=setup.digest,
        plan=_plain(to_json(setup.plan)),
        provenance=make_provenance(world, started_utc),
        method=_method(setup),
        warnings=_warnings(setup),
    )


def make_result(blank: Result, setup: Setup, runtime: Runtime, measured: Measured) -> Result:
    """The document; the same on every rank. Collective."""
    plan, world = setup.plan, runtime.world
    timing = _timing(plan, world, measured.timed)
    load = gather_load(plan, world, measured.timed.load)
    first = max(float(v) for v in world.gather(torch.tensor([measured.first_call_us]).double()))
    tally = runtime.tally
    bad = tally.gather(world, plan.num_local_experts) if tally else None
    result = replace(
        blank,
        status=_status(measured.verification, bad),
        provenance=replace(blank.provenance, versions=loaded_versions(), finished_utc=utc_now()),
        method=replace(blank.method, graph=measured.kind == "graph", align=_align(runtime)),
        timing=timing,
        first_call_us=first or None,
        throughput=build_throughput(measured.timed.tokens / len(measured.timed.plain), timing),
        layer_floor=_layer_floor(plan, load, timing),
        floors=_floors(plan, measured.timed, load, timing),
        expert_load=load.summary,
        packed_rows=packed_rows_use(plan, world, measured.timed.load),
        memory=_memory(runtime),
        weights=_weights(setup, runtime),
        step_counts=_step_counts(measured),
        verification=measured.verification,
        non_finite=bad,
        cause=_cause(bad),
        warnings=(*blank.warnings, *slow_ranks(timing)),
    )
    return withhold_speed(result) if plan.shared_gpu else result


def _align(runtime: Runtime) -> str:
    align = runtime.align
    return f"{align.name} ({align.reason})" if align.reason else align.name


def _status(verification: Verification | None, bad: NonFinite | None) -> RunStatus:
    if bad and any(bad.counts.values()):
        return "failed"
    return "wrong" if verification and not verification.passed else "passed"


def _cause(bad: NonFinite | None) -> Cause | None:
    if bad is None or bad.first_stage is None:
        return None
    expert = "" if bad.first_expert is None else f", expert {bad.first_expert}"
    return Cause(
        kind="non_finite",
        rank=bad.first_rank,
        step=bad.first_step,
        stage=bad.first_stage,
        message=f"NaN or infinite values, first on rank {bad.first_rank} in step {bad.first_step}, "
        f"stage {bad.first_stage}{expert}; rows by stage: {dict(bad.counts)}",
    )


def _method(setup: Setup) -> Method:
    plan, run = setup.plan, setup.config.run
    return Method(
        world_size=plan.world_size,
        layers=plan.layers,
        tokens_per_rank=plan.tokens_per_rank,
        transport=plan.transport.name,
        wire=plan.transport.wire,
        experts=plan.experts.name,
        graph=plan.graph_enabled,
        warmup_steps=run.warmup_steps,
        steps=run.steps,
        clock="cuda_event" if setup.device.type == "cuda" else "host",
        cache="cold" if plan.layers > 1 else "hot",
        shared_gpu=plan.shared_gpu,
    )


def _timing(plan: Plan, world: World, timed: Timed) -> Timing:
    names = list(timed.stages)
    rows = [timed.plain, timed.instrumented, *(timed.stages[name] for name in names)]
    everyone = world.gather(torch.tensor(rows, dtype=torch.float64))
    plain = {rank: table[0].tolist() for rank, table in enumerate(everyone)}
    stamped = {rank: table[1].tolist() for rank, table in enumerate(everyone)}
    stages = {
        rank: {name: table[2 + index].tolist() for index, name in enumerate(names)}
        for rank, table in enumerate(everyone)
    }
    return build_timing(plain, plan.layers, stamped, stages)


def _floors(plan: Plan, timed: Timed, load: Received, timing: Timing) -> dict[str, Floor]:
    if plan.device is None:
        return {}
    made = stage_floors(
        plan.model,
        Traffic(
            tokens=timed.tokens / len(timed.plain) / plan.world_size,
            copies=plan.copies_per_token,
            rows=load.busiest_rows,
            experts_hit=load.experts_hit,
        ),
        wire_fp8=plan.transport.wire == "fp8",
        shared_wire=plan.world_size == plan.ranks_per_gpu,
        device=plan.device,
    )
    floors = {}
    for stage, floor in made.items():
        measured = timing.stages.get(stage)
        if floor.floor_us is None or measured is None:
            continue
        floors[stage] = Floor(
            bytes=floor.bytes,
            flops=floor.flops,
            floor_us=floor.floor_us,
            fraction=floor.floor_us / measured.p50 if measured.p50 > 0 else None,
        )
    return floors


def _layer_floor(plan: Plan, load: Received, timing: Timing) -> Floor | None:
    """The routed layer's floor: weights of the experts hit, streamed once."""
    floor = weight_floor_us(plan.model, load.experts_hit, plan.device)
    if floor is None or plan.device is None:
        return None
    return Floor(
        bytes=round(floor * plan.device.hbm_bytes_s / 1e6),
        flops=round(6 * load.busiest_rows * plan.model.hidden * plan.model.expert_size),
        floor_us=floor,
        fraction=floor / timing.layer.p50,
    )


def _memory(runtime: Runtime) -> dict[str, MemoryUse]:
    """Planned bytes, and what was really taken, on the fullest rank; by category and in total."""
    plan, world = runtime.plan, runtime.world
    peaks = dict(runtime.memory) if world.device.type == "cuda" else {}
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(world.device)
        peaks["total"] = (total - free) // plan.ranks_per_gpu
    names = sorted(peaks)
    values = torch.tensor([[float(peaks[name]) for name in names]], dtype=torch.float64)
    most = torch.cat(world.gather(values)).amax(0).tolist()
    peak = {name: int(value) for name, value in zip(names, most, strict=True)}
    planned = {**plan.memory, "total": plan.memory_bytes}
    return {name: MemoryUse(planned=size, peak=peak.get(name)) for name, size in planned.items()}


def _weights(setup: Setup, runtime: Runtime) -> WeightsUse:
    loading = runtime.loading
    mine = torch.tensor([loading.bytes, loading.seconds], dtype=torch.float64)
    everyone = torch.stack(runtime.world.gather(mine))
    read, seconds = int(everyone[:, 0].sum()), float(everyone[:, 1].max())
    return WeightsUse(
        source=setup.config.weights.source,
        format=setup.plan.model.weight_format,
        bytes=read,
        seconds=seconds,
        gb_s=read / seconds / 1e9 if read and seconds > 0 else None,
    )


def _step_counts(measured: Measured) -> StepCounts:
    done = len(measured.timed.plain) + len(measured.timed.instrumented)
    graph = done if measured.kind == "graph" else 0
    return StepCounts(graph=graph, eager=done - graph, skipped=0)


def _warnings(setup: Setup) -> tuple[str, ...]:
    warnings = []
    if setup.config.run.warmup_steps == 0:
        warnings.append("run.warmup_steps is 0: the first timed steps hold lazy loading")
    if setup.device.type == "cuda" and setup.plan.layers == 1:
        warnings.append("one layer: its weights may stay in L2 between steps; use two or more")
    if not setup.config.run.verify:
        warnings.append("run.verify is off: nobody looked at the numbers")
    return tuple(warnings)


def _plain(value: object) -> dict[str, object]:
    """Tuples to lists, infinities refused: what JSON can hold."""
    made = _jsonable(value)
    assert isinstance(made, dict)
    return made


def _jsonable(value: object) -> object:
    if isinstance(value, dict):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a plan holds finite figures only")
    return value
