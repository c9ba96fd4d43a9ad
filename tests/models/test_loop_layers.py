"""Which of a model's layers the loop holds."""

from __future__ import annotations

import pytest

from epdecode.errors import ConfigError
from epdecode.models.layers import LoopLayer, layer_problems, loop_layers
from tests.small import small_model, small_plan

SPARSE = small_model(num_moe_layers=3, moe_layers=(1, 3, 5))


def test_a_count_takes_the_first_moe_layers_by_the_models_own_numbers() -> None:
    assert loop_layers(2, SPARSE) == (LoopLayer(1, 0), LoopLayer(3, 1))
    assert loop_layers(2, small_model()) == (LoopLayer(0, 0), LoopLayer(1, 1))


def test_a_list_names_the_models_layers() -> None:
    assert loop_layers((3, 5), SPARSE) == (LoopLayer(3, 1), LoopLayer(5, 2))
    plan = small_plan(2, "layers=[1, 5]", model=SPARSE)
    assert plan.layers == 2
    assert plan.loop_layers == (LoopLayer(1, 0), LoopLayer(5, 2))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (4, "layers: got 4; tiny has 3 MoE layers"),
        ((2,), "layers: got 2; accepted: MoE layers of tiny, 1, 3, 5"),
    ],
)
def test_layers_the_model_lacks_are_refused(layers: object, message: str) -> None:
    assert layer_problems(layers, SPARSE) == [message]
    written = list(layers) if isinstance(layers, tuple) else layers
    with pytest.raises(ConfigError, match=message.partition(";")[2]):
        small_plan(1, f"layers={written}", model=SPARSE)


def test_consecutive_numbers_are_shown_as_a_range() -> None:
    model = small_model(num_moe_layers=3, moe_layers=(3, 4, 5))
    assert layer_problems((1,), model) == ["layers: got 1; accepted: MoE layers of tiny, 3 to 5"]
