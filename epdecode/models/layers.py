"""Which of a model's layers the loop holds, by the model's own numbers and among its MoE layers."""

from __future__ import annotations

from dataclasses import dataclass

from epdecode.errors import ConfigError
from epdecode.models import ModelShape


@dataclass(frozen=True, slots=True)
class LoopLayer:
    """One layer of the loop.

    number: the model's own, from 0, dense layers counted; ordinal: among the MoE layers, from 0.
    """

    number: int
    ordinal: int


def moe_numbers(model: ModelShape) -> tuple[int, ...]:
    """The model's own number of each MoE layer; 0, 1, ... where its shape file gives none."""
    return model.moe_layers or tuple(range(model.num_moe_layers))


def loop_layers(layers: int | tuple[int, ...], model: ModelShape) -> tuple[LoopLayer, ...]:
    """The layers of ``config.layers``, which ``layer_problems`` has found no fault with."""
    numbers = moe_numbers(model)
    chosen = numbers[:layers] if isinstance(layers, int) else layers
    return tuple(LoopLayer(number, numbers.index(number)) for number in chosen)


def layer_problems(layers: int | tuple[int, ...], model: ModelShape) -> list[str]:
    """What ``config.layers`` asks for that the model does not have."""
    if isinstance(layers, int):
        if layers <= model.num_moe_layers:
            return []
        return [f"layers: got {layers}; {model.name} has {model.num_moe_layers} MoE layers"]
    numbers = moe_numbers(model)
    absent = [number for number in layers if number not in numbers]
    if not absent:
        return []
    known = f"{numbers[0]} to {numbers[-1]}"
    if numbers != tuple(range(numbers[0], numbers[-1] + 1)):
        known = ", ".join(map(str, numbers))
    return [f"layers: got {absent[0]}; accepted: MoE layers of {model.name}, {known}"]


def recorded_rows(
    num_rows: int, layers: tuple[LoopLayer, ...], model: ModelShape, source: str
) -> tuple[int, ...]:
    """Which row of a recording each layer of the loop has.

    A recording has a row per MoE layer of the model, per layer of the loop, or per layer of the
    model with the dense ones. Raises ConfigError for any other number of rows.
    """
    if num_rows == model.num_moe_layers:
        return tuple(layer.ordinal for layer in layers)
    if num_rows == len(layers):
        return tuple(range(num_rows))
    if num_rows > moe_numbers(model)[-1]:
        return tuple(layer.number for layer in layers)
    raise ConfigError(
        f"{source}: {num_rows} layers; accepted: {model.num_moe_layers}, the MoE layers of "
        f"{model.name}, or {len(layers)}, those of the loop"
    )
