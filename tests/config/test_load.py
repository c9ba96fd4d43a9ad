"""Config files to dataclasses: every mistake at once, overrides, round trips, digests."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epdecode.config import BatchConfig, Config, HardwareConfig, LimitsConfig, TransportConfig
from epdecode.config import load as config_load
from epdecode.config.load import (
    configs_dir,
    digest,
    find_preset,
    load_config,
    load_model,
    resolved_yaml,
)
from epdecode.errors import ConfigError, Exit

PRESETS = sorted(path.stem for path in configs_dir().glob("*.yaml"))


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "x.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def complaints(tmp_path: Path, text: str, *overrides: str) -> list[str]:
    """The error's lines, with the file's path cut to its name."""
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text), overrides)
    assert caught.value.exit_code == Exit.CONFIG
    return [line.removeprefix(f"{tmp_path}/") for line in str(caught.value).splitlines()]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("layesr: 8", "x.yaml:1: layesr: unknown key; accepted: model, layers, "),
        (
            "experts:\n  scale_fmtt: ue8m0",
            "x.yaml:2: experts.scale_fmtt: unknown key; accepted: name",
        ),
        ("wire: fp8", "x.yaml:1: wire: unknown key; "),
        ("transport: {wire: off}", "x.yaml:1: transport.wire: got off, accepted: fp8, bf16; YAML"),
        (
            "model: 7",
            "x.yaml:1: model: got 7, accepted: text; YAML reads an unquoted 7 as a number",
        ),
        (
            "graph: off",
            "x.yaml:1: graph: got off, accepted: a section with the keys enabled; did you",
        ),
        ("layers: true", "x.yaml:1: layers: got true, accepted: a whole number >= 1"),
        ("layers: 2.0", "x.yaml:1: layers: got 2.0, accepted: a whole number >= 1"),
        (
            "layers: []",
            "x.yaml:1: layers: got [], accepted: a count, or numbers of the model's MoE layers",
        ),
        ("layers: [10, 3]", "x.yaml:1: layers: got [10, 3], accepted: a count, or numbers"),
        (
            "layers: [3, -1]",
            "x.yaml:1: layers: got a list, accepted: a whole number >= 1, or a list",
        ),
        (
            "routing: {kind: trace}",
            "x.yaml:1: routing.path: got null, accepted: a file, for routing.kind",
        ),
        (
            "routing: {path: x.npy}",
            "x.yaml:1: routing.path: got x.npy, accepted: null, or routing.kind",
        ),
        (
            "routing: {share: 1.5}",
            "x.yaml:1: routing.share: got 1.5, accepted: a number >= 0 and <= 1",
        ),
        (
            "experts: {redundant: 8}",
            "x.yaml:1: experts.redundant: got 8, accepted: 0, or experts.placement",
        ),
        (
            "experts: {load: x.csv}",
            "x.yaml:1: experts.load: got x.csv, accepted: null, or experts.placem",
        ),
        (
            "weights: {path: x}",
            "x.yaml:1: weights.path: got x, accepted: null, or weights.source: check",
        ),
        (
            "run: {steps: '2'}",
            "x.yaml:1: run.steps: got '2', accepted: a whole number >= 1; leave the quotes",
        ),
        (
            "limits: {join_s: 1:30:00}",
            "x.yaml:1: limits.join_s: got 1:30:00, accepted: a number > 0",
        ),
        ("limits: {join_s: 0}", "x.yaml:1: limits.join_s: got 0, accepted: a number > 0"),
        ("limits: {join_s: .inf}", "x.yaml:1: limits.join_s: got .inf, accepted: a number > 0"),
        ("run: {steps: 0}", "x.yaml:1: run.steps: got 0, accepted: a whole number >= 1"),
        ("run: {steps: -3}", "x.yaml:1: run.steps: got -3, accepted: a whole number >= 1"),
        ("run: {verify: 1}", "x.yaml:1: run.verify: got 1, accepted: true or false"),
        ("run:", "x.yaml:1: run: got nothing, accepted: a section with the keys"),
        ("run: [1]", "x.yaml:1: run: got a list, accepted: a section with the keys"),
        ("transport: {name: deepep_l}", "x.yaml:1: transport.name: got deepep_l, accepted: "),
        (
            "parallel: {ep: all}",
            "x.yaml:1: parallel.ep: got all, accepted: a whole number >= 1, or auto",
        ),
        (
            "batch: {buckets: 8}",
            "x.yaml:1: batch.buckets: got 8, accepted: a list, each item a whole",
        ),
        ("batch: {buckets: [1, x]}", "x.yaml:1: batch.buckets[1]: got x, accepted: a whole number"),
        (
            "batch: {buckets: []}",
            "x.yaml:1: batch.buckets: got [], accepted: at least one batch size",
        ),
        (
            "batch: {buckets: [4, 2, 2, 128]}",
            "x.yaml:1: batch.buckets: got [4, 2, 2, 128], accepted: ",
        ),
        (
            "batch: {tokens_per_rank: 129}",
            "x.yaml:1: batch.tokens_per_rank: got 129, accepted: up to",
        ),
        ("layers: 1\nlayers: 2", "x.yaml:2: layers: duplicate key (first on line 1); keep one"),
        ("- 1", "x.yaml:1: the file holds no keys"),
        ("", "x.yaml:1: the file holds no keys"),
    ],
)
def test_a_mistake_is_one_line_with_place_key_got_and_accepted(
    tmp_path: Path, text: str, line: str
):
    got = complaints(tmp_path, text)
    assert len(got) == 1
    assert got[0].startswith(line), got[0]


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("layesr: 8", "'layers'"),
        ("wire: fp8", "'transport.wire'"),
        ("transport: {name: deepep_l}", "'deepep_ll'"),
        ("batch: {bucket: [1]}", "'buckets'"),
        ("graph: off", "{enabled: off}"),
    ],
)
def test_the_nearest_name_is_given(tmp_path: Path, text: str, nearest: str):
    assert complaints(tmp_path, text)[0].endswith(f"; did you mean {nearest}?")


def test_a_bucket_above_the_dispatch_limit_is_refused(tmp_path: Path):
    text = (
        "transport: {max_tokens_per_rank: 16}\nbatch: {buckets: [1, 8, 16, 32], tokens_per_rank: 8}"
    )
    (line,) = complaints(tmp_path, text)
    assert line.startswith("x.yaml:2: batch.buckets: got 32, accepted: up to transport.max_tokens")
    assert "16" in line


def test_every_mistake_of_file_and_overrides_is_reported_at_once_in_order(tmp_path: Path):
    text = "layers: true\nrun: {steps: 0}\nbatch: {buckets: [2, 1], tokens_per_rank: 1}\nfoo: 1"
    got = complaints(tmp_path, text, "transport.wire=fp9", "nonsense", "bar.baz=1")
    assert [line.split(": ")[0] for line in got] == [
        "x.yaml:1",
        "x.yaml:2",
        "x.yaml:3",
        "x.yaml:4",
        "override 'bar.baz=1'",
        "override 'nonsense'",
        "override 'transport.wire=fp9'",
    ]


def test_a_rule_that_rests_on_a_wrong_value_is_silent(tmp_path: Path):
    got = complaints(tmp_path, "batch: {buckets: [1, x], tokens_per_rank: 500}")
    assert len(got) == 1


def test_very_many_mistakes_are_cut(tmp_path: Path):
    got = complaints(tmp_path, "\n".join(f"key{i}: 1" for i in range(1000)))
    assert len(got) == 41
    assert got[-1] == "... and more"


def test_numbers_and_switches_as_yaml_writes_them(tmp_path: Path):
    text = "graph: {enabled: off}\nlimits: {join_s: 1e-3, step_s: 20}\nhardware: {memory_gib: 80}"
    config = load_config(write(tmp_path, text))
    assert not config.graph.enabled
    assert config.limits == LimitsConfig(join_s=1e-3, step_s=20)
    assert config.hardware.memory_gib == 80


def test_overrides_parse_as_yaml_make_sections_and_the_last_one_wins(tmp_path: Path):
    config = load_config(
        write(tmp_path, "transport: {wire: bf16, max_tokens_per_rank: 8}\nlayers: 3"),
        ["batch.buckets=[1, 8]", "batch.tokens_per_rank=8", "layers=4", "layers=5", "run.verify=no"]
        + ["parallel={stand_in_ep: 8}", "parallel.ep=1"],
    )
    assert config.batch == BatchConfig(buckets=(1, 8), tokens_per_rank=8)
    assert (config.layers, config.run.verify) == (5, False)
    assert (config.parallel.ep, config.parallel.stand_in_ep) == (1, 8)
    assert config.transport == TransportConfig(wire="bf16", max_tokens_per_rank=8)


def test_a_section_override_replaces_the_section(tmp_path: Path):
    path = write(tmp_path, "transport: {wire: bf16}")
    assert load_config(path, ["transport={name: deepep_ll}"]).transport.wire == "fp8"


@pytest.mark.parametrize("text", ["=1", ".=1", "layers.=1", "a..b=1", "layers"])
def test_malformed_overrides_show_the_form(tmp_path: Path, text: str):
    assert complaints(tmp_path, "layers: 2", text) == [
        f"override {text!r}: accepted: key=value or section.key=value"
    ]


def test_no_path_is_the_default_and_a_name_is_a_preset():
    assert load_config() == load_config("cpu-tiny") == load_config(configs_dir() / "cpu-tiny.yaml")
    assert find_preset("cpu-tiny") == find_preset(None) == configs_dir() / "cpu-tiny.yaml"
    with pytest.raises(ConfigError, match="did you mean 'cpu-tiny'"):
        find_preset("cpu-tinny")


def test_the_default_preset_is_the_designed_one():
    config = load_config()
    assert (config.model, config.layers, config.run.steps) == ("tiny", 2, 20)
    assert (config.transport.name, config.experts.name) == ("torch_a2a", "torch_loop")
    assert config.batch == BatchConfig(buckets=(1, 2, 4, 8, 16), tokens_per_rank=16, vary=True)
    assert not config.graph.enabled


@pytest.mark.parametrize("name", PRESETS)
def test_presets_load_and_their_resolved_form_has_the_same_digest(tmp_path: Path, name: str):
    config = load_config(name)
    model = load_model(config.model, near=find_preset(name))
    again = load_config(write(tmp_path, resolved_yaml(config)))
    assert again == config
    assert digest(again, model) == digest(config, model)


def test_the_digest_follows_every_value_but_not_the_models_path_or_source():
    config = load_config()
    model = load_model(config.model)
    base = digest(config, model)
    assert len(base) == 64
    assert digest(dataclasses.replace(config, layers=3), model) != base
    assert digest(config, dataclasses.replace(model, top_k=3)) != base
    assert digest(config, dataclasses.replace(model, source="elsewhere", name="other")) == base
    assert digest(dataclasses.replace(config, model="./tiny.yaml"), model) == base


def test_a_relative_model_path_survives_being_moved(tmp_path: Path):
    shape = (configs_dir() / "models" / "tiny.yaml").read_text(encoding="utf-8")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "mine.yaml").write_text(shape, encoding="utf-8")
    first = write(tmp_path / "a", "model: mine.yaml")
    config = load_config(first)
    (tmp_path / "b").mkdir()
    moved = write(tmp_path / "b", resolved_yaml(config, first))
    again = load_config(moved)
    assert digest(again, load_model(again.model, moved)) == digest(
        config, load_model(config.model, first)
    )


sizes = st.integers(1, 10**6)
seconds = st.floats(min_value=0, exclude_min=True, allow_infinity=False) | st.integers(1, 10**9)
configs = st.builds(
    Config,
    model=st.sampled_from(["tiny", "deepseek-v3"]),
    layers=sizes,
    batch=st.builds(
        BatchConfig,
        buckets=st.sets(st.integers(1, 128), min_size=1).map(lambda found: tuple(sorted(found))),
        tokens_per_rank=st.just(1),
        vary=st.booleans(),
    ),
    limits=st.builds(LimitsConfig, join_s=seconds, step_s=seconds),
    hardware=st.builds(HardwareConfig, memory_gib=st.just("auto") | seconds),
)


@settings(max_examples=60, deadline=2000)
@given(config=configs)
def test_any_config_written_out_reads_back(
    tmp_path_factory: pytest.TempPathFactory, config: Config
):
    path = write(tmp_path_factory.getbasetemp(), resolved_yaml(config))
    again = load_config(path)
    model = load_model(config.model)
    assert again == config
    assert digest(again, model) == digest(config, model)


def test_presets_lie_beside_the_package_in_a_checkout_and_inside_it_when_installed(
    tmp_path: Path, monkeypatch
):
    package = tmp_path / "epdecode"
    package.mkdir()
    monkeypatch.setattr(config_load, "__file__", str(package / "config" / "load.py"))
    assert configs_dir() == tmp_path / "configs"
    (package / "configs").mkdir()
    assert configs_dir() == package / "configs"
