"""`epdecode bench kernels` without a GPU: cases, shapes, refusals, and that wrong gets no time."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
import typer
from typer.testing import CliRunner

from epdecode.batch import Fp8Rows
from epdecode.bench import command, kernel_cases, kernels, timing
from epdecode.bench.cases import (
    Built,
    Case,
    expert_counts,
    quantized_difference,
    windows,
)
from epdecode.bench.kernel_shapes import default_shapes, shrunk
from epdecode.bench.kernels import parse_shape
from epdecode.errors import ConfigError, EnvironmentFault, Exit
from epdecode.kernels.fp8 import mn_major_scales, quantize_ref


@pytest.fixture
def run():
    app = typer.Typer()
    app.command()(kernels.kernels)
    return partial(CliRunner().invoke, app)


def test_every_op_is_checked_under_the_interpreter_and_nothing_is_timed(run):
    result = run(["--json"])
    assert result.exit_code == Exit.OK
    document = json.loads(result.stdout)
    assert document["timed"] is False
    assert {line["op"] for line in document["lines"]} == set(kernel_cases.CASES)
    assert all(line["correct"] for line in document["lines"])
    assert all(line["hot_us"] is None for line in document["lines"])


def test_the_table_says_that_there_is_no_gpu(run):
    result = run(["--only", "rms_norm", "--shapes", "T=3,H=256"])
    assert result.exit_code == Exit.OK
    assert "No GPU: correctness only" in result.stdout
    assert "T=3 H=256" in result.stdout


def test_a_wrong_kernel_is_named_gets_no_time_and_exit_code_4(run, monkeypatch):
    def wrong(shape) -> Case:
        built = Built((lambda: None,), lambda: None, None, lambda: "3 of 9 values are off")
        return Case("rms_norm", shape, 1, lambda device, sets: built)

    monkeypatch.setitem(kernel_cases.CASES, "rms_norm", wrong)
    result = run(["--only", "rms_norm", "--json"])
    assert result.exit_code == Exit.WRONG_NUMBERS
    line = json.loads(result.stdout)["lines"][0]
    assert line["difference"] == "3 of 9 values are off"
    assert line["hot_us"] is None


def test_a_wrong_kernel_is_not_timed_on_a_gpu_either(monkeypatch):
    def refuse(*_: object) -> None:
        raise AssertionError("timed")

    monkeypatch.setattr(timing, "hot_us", refuse)
    built = Built((refuse,), refuse, None, lambda: "data differ")
    case = Case("pack", {}, 1, lambda device, sets: built)
    line = kernels._run(case, timing.Streams(4.0, 4.0))
    assert (line.correct, line.difference, line.hot_us) == (False, "data differ", None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "swiglu_qant"], "did you mean 'swiglu_quant'"),
        (["--shapes", "T=1,H=128"], "exactly one --only"),
        (["--only", "rms_norm", "--shapes", "T=1,H"], "'H' in 'T=1,H' is not KEY=VALUE"),
        (["--only", "rms_norm", "--shapes", "T=1"], "rms_norm with {'T': 1}: KeyError"),
    ],
)
def test_mistakes_are_refused(run, arguments, message):
    error = run(arguments).exception
    assert isinstance(error, ConfigError)
    assert message in str(error)


def test_parse_shape():
    assert parse_shape("E=32, live=64,load=skew") == {"E": 32, "live": 64, "load": "skew"}


def test_shrunk_keeps_what_is_small():
    assert shrunk({"E": 2, "M": 1024, "load": "even"}) == {"E": 2, "M": 8, "load": "even"}


def test_the_table_has_every_shape_that_peers_were_measured_on():
    swiglu = [shape for op, shape in default_shapes() if op == "swiglu_quant"]
    assert len(swiglu) == 2 * 10 + 3
    assert {"E": 9, "M": 2048, "I": 2048, "live": 1024, "load": "skew"} in swiglu


@pytest.mark.parametrize("load", ["even", "skew", "one"])
@pytest.mark.parametrize(("experts", "capacity", "live"), [(32, 1024, 64), (9, 2048, 1024)])
def test_loads_place_every_row(load, experts, capacity, live):
    counts = expert_counts(experts, capacity, live, load)
    assert sum(counts) == live
    assert len(counts) == experts
    assert max(counts) == {"even": -(-live // experts), "one": live}.get(load, max(counts))
    assert counts == sorted(counts, reverse=True)


def test_what_a_full_expert_cannot_take_is_lost():
    assert expert_counts(4, 3, 10, "one") == [3, 0, 0, 0]


def test_windows_are_dense_and_what_a_call_touches_does_not_overlap():
    found = windows((3, 8, 4), most=3, sets=5, dtype=torch.float32, device=torch.device("cpu"))
    assert all(x.is_contiguous() and x.shape == (3, 8, 4) for x in found)
    for mark, x in enumerate(found):
        x[:, :3] = mark
    assert all((x[:, :3] == mark).all() for mark, x in enumerate(found))


def test_a_difference_of_one_byte_is_seen_when_exact():
    rows = quantize_ref(torch.randn(2, 128))
    data = rows.data.view(torch.uint8).clone()
    data[1, 5] ^= 1
    changed = Fp8Rows(data.view(torch.float8_e4m3fn), rows.scales)
    assert quantized_difference(rows, rows, exact=True) == ""
    assert quantized_difference(changed, rows, exact=True) == "data differ"


@pytest.mark.parametrize("shape", [(1, 1, 128), (1, 64, 128), (2, 5, 384), (1, 1, 640)])
@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
def test_column_major_scales_are_compared_to_the_byte(shape, scale_format):
    rows = quantize_ref(torch.randn(shape), scale_format)
    experts, capacity, size = shape
    column = mn_major_scales(experts, capacity, size // 128, scale_format)
    got, want = (Fp8Rows(rows.data, column.clone().copy_(rows.scales)) for _ in range(2))
    assert quantized_difference(got, want, exact=True) == ""
    got.scales[-1, -1, -1] *= 2
    assert quantized_difference(got, want, exact=True) == "scales differ"


def test_wrong_scales_are_seen_without_a_gpu_too():
    rows = quantize_ref(torch.randn(4, 256))
    changed = Fp8Rows(rows.data, rows.scales * 2)
    assert "values are off" in quantized_difference(changed, rows, exact=False)


def test_cold_sets_exceed_the_cache_and_stay_bounded():
    assert timing.cold_sets(10_500_000) * 10_500_000 > timing.COLD_BYTES
    assert timing.cold_sets(100) == timing.MOST_SETS
    assert timing.cold_sets(10**12) == 2


def test_timing_without_a_gpu_is_refused():
    with pytest.raises(EnvironmentFault, match="timing needs a CUDA GPU"):
        timing.measure_streams()


def test_bench_has_the_kernels_command():
    result = CliRunner().invoke(command.app, ["kernels", "--only", "rms_norm", "--json"])
    assert result.exit_code == Exit.OK
    assert json.loads(result.stdout)["lines"][0]["op"] == "rms_norm"
