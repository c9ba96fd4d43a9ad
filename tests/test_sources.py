"""What a config names outside itself: opened once, compared between ranks, kept in the digest."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch

from epdecode.build import build
from epdecode.config import Config
from epdecode.config.load import digest, load_config, resolved_yaml
from epdecode.errors import ConfigError
from epdecode.plan import make_plan
from epdecode.routing.load import Recorded, read_recorded
from epdecode.routing.table import LoadTable
from epdecode.routing.trace import Trace
from epdecode.sources import NO_SOURCES, Sources, open_sources
from epdecode.weights import source as weight_source
from epdecode.weights.source import load_weights
from epdecode.world import World
from tests.checkpoints import FIXTURES, maker
from tests.ranks import run_ranks
from tests.small import small_config, small_model


def trace(first: int = 0) -> Trace:
    ids = np.zeros((300, 2, 2), dtype=np.int16) + np.array([0, 1], dtype=np.int16)
    ids[0, 0, 0] = first
    return Trace(ids, "t.npy")


def test_the_digest_is_of_what_was_recorded() -> None:
    table = LoadTable(np.ones((2, 8)), "t.csv")
    made = {
        Sources(recorded=recorded).digest
        for recorded in (
            Recorded(),
            Recorded(routing=trace()),
            Recorded(routing=trace(5)),
            Recorded(routing=trace(), load=table),
            Recorded(load=table),
        )
    }
    assert len(made) == 5
    assert NO_SOURCES.digest == "none"


def opened(config: Config, recorded: Recorded) -> Sources:
    plan = make_plan(config, small_model(), 2, recorded=recorded)
    return open_sources(config, small_model(), plan, recorded)


def test_a_trace_is_looked_through_also_when_the_placement_has_another_load() -> None:
    config = small_config("routing={kind: trace, path: t.npy}", "run.steps=2")
    assert opened(config, Recorded(routing=trace())).checkpoint is None
    table = LoadTable(np.ones((2, 8)), "t.csv")
    for recorded in (Recorded(routing=trace(99)), Recorded(routing=trace(99), load=table)):
        with pytest.raises(ConfigError, match="has expert 99; accepted: -1 to 7"):
            opened(config, recorded)


def test_files_are_found_beside_the_config_and_written_out_absolute(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", trace().ids)
    path = tmp_path / "c.yaml"
    path.write_text("routing: {kind: trace, path: t.npy}\nexperts: {name: torch_loop}\n")
    config = load_config(path)
    assert read_recorded(config, path).any
    text = resolved_yaml(config, path)
    assert f"path: {tmp_path}/t.npy" in text
    moved = tmp_path / "elsewhere" / "c.yaml"
    moved.parent.mkdir()
    moved.write_text(text)
    assert digest(load_config(moved), small_model()) == digest(config, small_model())


def test_the_name_of_what_is_read_is_part_of_the_digest() -> None:
    model = small_model()
    made = {
        digest(small_config(*overrides), model)
        for overrides in (
            [],
            ["weights={source: checkpoint, path: /a/m}"],
            ["weights={source: checkpoint, path: /b/m}"],
            ["weights={source: checkpoint, path: /a/n}"],
        )
    }
    assert len(made) == 3


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(world: World, folder: str, long: bool) -> str:
    """What a terminal sees of a load."""
    terminal = Terminal()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stderr", terminal)
        if long:
            patch.setattr(weight_source, "LONG_BYTES", 0)
        config = small_config(f"model={folder}", "weights.source=checkpoint")
        recorded = Recorded()
        model = maker().load_hf(Path(folder) / "config.json")
        plan = make_plan(config, model, world.size)
        sources = open_sources(config, model, plan, recorded)
        _, loading = load_weights(config, plan, world, sources.checkpoint)
        assert loading.bytes > 1e6
        assert loading.seconds > 0
    return terminal.getvalue()


def test_a_bar_on_rank_0_of_a_terminal_when_it_takes_long(tmp_path: Path) -> None:
    maker().make(FIXTURES / "mixtral" / "config.json", tmp_path)
    first, second = run_ranks(2, shown, str(tmp_path), True)
    assert "weights" in first
    assert "/s" in first
    assert second == ""
    assert run_ranks(1, shown, str(tmp_path), False) == [""]


def without_checkpoint(world: World) -> None:
    config = small_config("weights={source: checkpoint, path: x}")
    build(config, make_plan(config, small_model(), 1), world)


def test_a_checkpoint_that_nobody_opened_is_an_error_not_random_weights() -> None:
    with pytest.raises(Exception, match="needs one that has been opened and checked"):
        run_ranks(1, without_checkpoint)


def seeded(world: World) -> tuple[int, bool]:
    config = small_config()
    plan = make_plan(config, small_model(), world.size)
    layers, loading = load_weights(config, plan, world, None)
    return loading.bytes, torch.equal(layers[0].gate, layers[1].gate)


def test_seeded_weights_read_nothing() -> None:
    assert run_ranks(1, seeded) == [(0, False)]
