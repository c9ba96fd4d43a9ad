"""Checks and times expert backends on one case, and finds the best cut of ours."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from epdecode.bench import expert_backends as backends
from epdecode.bench.expert_cases import LAYERS, ExpertCase, Inputs, error_of, make_inputs, untouched
from epdecode.bench.expert_report import Line
from epdecode.bench.timing import graph_us
from epdecode.errors import EnvironmentFault
from epdecode.experts.tuned_table import table_of, tuned_path
from epdecode.plan.expert_choice import (
    MOST_STAGES,
    SPLITS,
    Choice,
    bucket,
    choose,
    default_choice,
    load_table,
    save_table,
    splits_for,
)

if TYPE_CHECKING:
    from epdecode.bench.timing import Streams
    from epdecode.experts.chains import Chain

log = logging.getLogger(__name__)

WRONG = 0.02
"""Relative error from which a backend is wrong: bfloat16 output and some moved FP8 steps."""
REPLAYS = 12


def run_case(case: ExpertCase, streams: Streams, tune: bool) -> list[Line]:
    """Every backend on one case: the first layer is checked, then all layers are timed."""
    torch.cuda.empty_cache()
    device = torch.device("cuda")
    inputs = make_inputs(case, LAYERS, device)
    floor = case.floor_bytes() / streams.read_tb_s / 1e6
    chain = backends.triton_chain(case, inputs)
    choice = _best_choice(case, inputs, chain) if tune else _choice(case, device)
    ours = backends.triton_layer(inputs, chain, choice)
    lines = [_measure(case, "triton_gemm", inputs, ours, floor, choice)]
    try:
        rival = backends.deepgemm_layer(case, inputs)
        lines.append(_measure(case, "deepgemm", inputs, rival, floor))
    except EnvironmentFault as error:
        log.warning("deepgemm is left out: %s", error)
    if tune:
        _remember(case, lines, device)
    return lines


def _choice(case: ExpertCase, device: torch.device) -> Choice:
    """The table's cut for ours, whichever backend the table prefers."""
    found = choose(case.shape, case.fuller_rows, table_of(device))
    return found if found.backend == "triton_gemm" else default_choice(case.shape, case.fuller_rows)


def _measure(
    case: ExpertCase,
    backend: str,
    inputs: Inputs,
    layer: backends.Layer,
    floor: float,
    choice: Choice | None = None,
) -> Line:
    inputs.out.fill_(torch.nan)
    layer(0)
    error = error_of(inputs)
    note = "" if error < WRONG else f"wrong: {error:.3g}"
    if backend == "triton_gemm" and not untouched(inputs):
        note = "wrong: rows past a count were written"
    shape = case.shape
    line = Line(
        experts=shape.experts,
        rows=case.rows,
        hidden=shape.hidden,
        size=shape.size,
        load=case.load,
        backend=backend,
        correct=not note,
        note=note,
        choice=choice,
        error=error if error < float("inf") else None,
        floor_us=floor,
    )
    if not line.correct:
        return line
    us = _time(layer)
    return replace(line, us=us, share=floor / us)


def _time(layer: backends.Layer) -> float:
    calls = [lambda index=index: layer(index) for index in range(LAYERS)]
    return graph_us(calls, replays=REPLAYS, warmup=2).p50


def candidates(case: ExpertCase) -> list[Choice]:
    """Cuts worth trying for a case, the rule's first, then one change at a time."""
    rows = case.fuller_rows
    made = [replace(default_choice(case.shape, rows), backend="triton_gemm")]
    for tokens, most in MOST_STAGES.items():
        if rows // 2 <= tokens <= max(16, 4 * rows):
            cut = Choice(tokens=tokens, stages=most, narrow=tokens <= 32)
            fill = splits_for(case.shape, rows, tokens)
            splits = {fill, min(2 * fill, SPLITS[-1])}
            made += [cut, replace(cut, narrow=False), replace(cut, stages=3)]
            made += [replace(cut, splits=parts) for parts in sorted(splits)]
    return list(dict.fromkeys(made))


def _best_choice(case: ExpertCase, inputs: Inputs, chain: Chain) -> Choice:
    """The fastest right cut."""
    found = {}
    for choice in candidates(case):
        layer = backends.triton_layer(inputs, chain, choice)
        inputs.out.fill_(torch.nan)
        layer(0)
        if error_of(inputs) < WRONG:
            found[choice] = _time(layer)
            log.info("%s: %.1f us", choice, found[choice])
    return min(found, key=found.__getitem__, default=default_choice(case.shape, case.fuller_rows))


def _remember(case: ExpertCase, lines: list[Line], device: torch.device) -> None:
    """Write the faster backend, and how ours was cut, into this machine's table."""
    timed = [line for line in lines if line.us is not None and line.correct]
    if not timed:
        return
    best = min(timed, key=lambda line: line.us or 0.0)
    choice = lines[0].choice or default_choice(case.shape, case.fuller_rows)
    choice = replace(choice, backend="deepgemm" if best.backend == "deepgemm" else "triton_gemm")
    path = tuned_path(device)
    table = load_table(path)
    entries = {**table.get(case.shape.key, {}), bucket(case.fuller_rows): choice}
    save_table(path, {**table, case.shape.key: entries})
    log.info("%s: %s rows: %s", path, bucket(case.fuller_rows), choice)
