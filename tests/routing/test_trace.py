"""Traces: every format and integer type, sliced alike on every rank, refused when unfit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

from epdecode.errors import ConfigError
from epdecode.inputs import first_tokens, make_batches, token_counts, tokens_needed
from epdecode.models.layers import loop_layers, recorded_rows
from epdecode.plan import make_plan
from epdecode.routing.load import read_load, read_recorded, recorded_load
from epdecode.routing.trace import Trace, check_trace, need_tokens, read_trace, write_trace
from epdecode.session import open_runtime
from epdecode.world import World
from tests.ranks import run_ranks
from tests.small import small_config, small_model

INTEGERS = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16]


def ids(tokens: int = 40, layers: int = 4, experts: int = 8, top_k: int = 2) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.random((tokens, layers, experts)).argsort(2)[..., :top_k]


def save(path: Path, array: np.ndarray) -> Path:
    if path.suffix == ".npy":
        np.save(path, array)
    elif path.suffix == ".npz":
        np.savez_compressed(path, routed_experts=array, other=np.zeros(1))
    else:
        save_file({"anything": np.ascontiguousarray(array)}, path)
    return path


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors"])
@pytest.mark.parametrize("kind", INTEGERS)
def test_every_format_and_integer_is_read(tmp_path: Path, suffix: str, kind: type) -> None:
    made = ids()
    trace = read_trace(save(tmp_path / f"t{suffix}", made.astype(kind)))
    check_trace(trace, 2, 8)
    assert np.array_equal(trace.ids, made)
    expected = [[(made[:, layer] == expert).sum() for expert in range(8)] for layer in range(4)]
    assert trace.counts(8).tolist() == expected


def test_no_expert_is_not_counted(tmp_path: Path) -> None:
    made = ids(10)
    made[:, :, 1] = -1
    trace = read_trace(save(tmp_path / "t.npy", made))
    check_trace(trace, 2, 8)
    assert trace.counts(8).sum() == 40


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (ids()[:, 0], r"got int64 \[40, 2\]; accepted: integers \[tokens, moe_layers, top_k\]"),
        (ids().astype(np.float32), "got float32"),
        (ids(top_k=3), "top_k is 3; the model has 2"),
        (ids() + 1, "has expert 8; accepted: -1 to 7"),
        (ids() - 2, "has expert -2; accepted: -1 to 7"),
        (np.full((40, 4, 2), 5), "token 0, layer row 0 has expert 5 twice; accepted: distinct"),
        (ids(0), "holds no tokens"),
    ],
)
def test_what_is_no_trace_of_this_model_is_refused(
    tmp_path: Path, array: np.ndarray, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_trace(read_trace(save(tmp_path / "t.npy", array)), 2, 8)


def test_a_fault_late_in_a_long_trace_is_found_by_its_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epdecode.routing.trace.CHUNK", 16)
    made = ids()
    made[37, 2] = [7, 9]
    with pytest.raises(ConfigError, match="token 37, layer row 2 has expert 9"):
        check_trace(read_trace(save(tmp_path / "t.npy", made)), 2, 8)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.pt", b"x", r"got \.pt; accepted: \('\.npy', '\.npz', '\.safetensors'\)"),
        ("t.npy", b"\x80\x04pickle", "cannot be read as .npy"),
        ("t.npz", b"x", "cannot be read as .npz"),
        ("t.safetensors", b"x", "cannot be read as .safetensors"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_trace(tmp_path / name)


def test_pickled_arrays_are_not_opened(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(ConfigError, match="cannot be read as .npy"):
        read_trace(tmp_path / "t.npy")


def test_several_arrays_need_the_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", a=ids(), b=ids())
    with pytest.raises(ConfigError, match="arrays a, b; accepted: one, or routed_experts"):
        read_trace(tmp_path / "t.npz")


def test_a_short_trace_is_refused_or_wrapped() -> None:
    trace = Trace(ids(10), "t.npy")
    need_tokens(trace, 10, wrap=False)
    need_tokens(trace, 99, wrap=True)
    with pytest.raises(ConfigError, match=r"t\.npy: 10 tokens; the run takes 11"):
        need_tokens(trace, 11, wrap=False)
    assert np.array_equal(trace.tokens(8, 5), trace.ids[[8, 9, 0, 1, 2]])
    assert np.array_equal(trace.tokens(28, 3), trace.ids[[8, 9, 0]])
    assert trace.tokens(3, 0).shape == (0, 4, 2)


def test_the_digest_tells_traces_apart() -> None:
    other = ids()
    other[0, 0] = other[0, 0, ::-1]
    assert Trace(ids(), "a").digest() == Trace(ids(), "b").digest()
    assert Trace(ids(), "a").digest() != Trace(other, "a").digest()


def test_rows_of_a_recording() -> None:
    model = small_model(num_moe_layers=3, moe_layers=(1, 3, 5))
    layers = loop_layers((3, 5), model)
    assert recorded_rows(3, layers, model, "t") == (1, 2)
    assert recorded_rows(2, layers, model, "t") == (0, 1)
    assert recorded_rows(6, layers, model, "t") == (3, 5)
    with pytest.raises(ConfigError, match="t: 5 layers; accepted: 3, the MoE layers of tiny, or 2"):
        recorded_rows(5, layers, model, "t")


def routes(world: World, path: str, steps: int) -> list[list[list[list[int]]]]:
    """This rank's routes, [step][layer][token]."""
    config = small_config("routing.kind=trace", f"routing.path={path}", f"run.steps={steps}")
    recorded = read_recorded(config)
    plan = make_plan(config, small_model(), world.size, recorded=recorded)
    batches = make_batches(config, plan, world, recorded)
    return [[ids.tolist() for ids, _ in planned.batch.forced] for planned in batches]


def test_ranks_take_a_trace_in_order_step_by_step(tmp_path: Path) -> None:
    """Together they read every token once, also past the number of other kinds' batches."""
    steps, config = 11, small_config("run.steps=11", "routing={kind: trace, path: x}")
    needed = tokens_needed(config, 4)
    made = ids(needed)
    path = save(tmp_path / "t.npy", made.astype(np.int16))
    results = run_ranks(4, routes, str(path), steps)
    for layer in range(2):
        read = [
            token
            for step in range(steps)
            for rank in range(4)
            for token in results[rank][step][layer]
        ]
        assert read == made[:, layer].tolist()


def test_first_tokens_count_steps_then_ranks() -> None:
    assert first_tokens([(3, 0, 2), (1, 1, 1)]) == [[0, 3, 3], [5, 6, 7]]


def test_counts_that_vary_are_the_same_for_every_rank() -> None:
    config = small_config()
    assert token_counts(config, 4, 3) == token_counts(config, 4, 3)
    assert token_counts(config, 4, 3) != token_counts(config, 4, 4)


def test_load_of_a_trace_for_the_layers_of_the_loop(tmp_path: Path) -> None:
    made = ids()
    trace = read_load(save(tmp_path / "t.npy", made))
    model = small_model()
    loads = recorded_load(trace, loop_layers((1, 3), model), model)
    assert [load.tolist() for load in loads] == [trace.counts(8)[1].tolist(),
                                                 trace.counts(8)[3].tolist()]  # fmt: skip


def test_writing_takes_the_smallest_type_and_keeps_the_facts(tmp_path: Path) -> None:
    for most, kind in ((127, np.int8), (128, np.int16), (40_000, np.int32)):
        write_trace(tmp_path / "t.safetensors", np.array([[[most, -1]]]), {"layers": "[0]"})
        trace = read_trace(tmp_path / "t.safetensors")
        assert trace.ids.dtype == kind
        assert trace.ids.tolist() == [[[most, -1]]]
    with safe_open(tmp_path / "t.safetensors", "np") as opened:
        assert opened.metadata() == {"layers": "[0]"}


def test_a_recorded_trace_is_none_without_a_path() -> None:
    recorded = read_recorded(small_config())
    assert recorded.routing is None
    assert recorded.load is None


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    config = small_config("routing={kind: trace, path: nowhere.npy}")
    with pytest.raises(ConfigError, match=r"routing.path: got 'nowhere.npy', accepted: an exist"):
        read_recorded(config, tmp_path / "x.yaml")


def test_a_trace_too_short_stops_before_anything_is_built(tmp_path: Path) -> None:
    path = save(tmp_path / "t.npy", ids(5))
    with (
        pytest.raises(ConfigError, match="5 tokens; the run takes"),
        open_runtime("cpu-tiny", ["routing.kind=trace", f"routing.path={path}"]),
    ):
        pass


def test_a_run_records_what_a_trace_replays(tmp_path: Path) -> None:
    """Through the main job: gate routes recorded, replayed, and recorded again."""
    from epdecode.run import main

    quick = ["run.steps=3", "run.warmup_steps=1", "run.record_routing=true"]
    assert main(["--out", str(tmp_path / "a"), *quick]) == 0
    (first,) = (tmp_path / "a").glob("*/routing.safetensors")
    again = ["routing.kind=trace", f"routing.path={first}"]
    assert main(["--out", str(tmp_path / "b"), *quick, *again]) == 0
    (second,) = (tmp_path / "b").glob("*/routing.safetensors")
    assert np.array_equal(read_trace(first).ids, read_trace(second).ids)
    results = [json.loads(next((tmp_path / x).glob("*/result.json")).read_text()) for x in "ab"]
    assert results[0]["expert_load"] == results[1]["expert_load"]
    with safe_open(first, "np") as opened:
        facts = opened.metadata()
    assert json.loads(facts["layers"]) == [0, 1]
    assert torch.tensor(json.loads(facts["tokens_per_rank_and_step"])).sum() == len(
        read_trace(first).ids
    )
