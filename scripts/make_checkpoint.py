#!/usr/bin/env python3
"""Writes a checkpoint with random weights in its family's real layout, for tests and demos.

    scripts/make_checkpoint.py CONFIG_JSON FOLDER [--layers 3,4] [--seed 0] [--shards 2]
        [--device cuda]

CONFIG_JSON is a Hugging Face config.json (copied into FOLDER): family, sizes and weight format are
what it says. The weights are those that `weights.source: seeded` makes with the same seed (for
gpt-oss random MXFP4 codes), so a run from the checkpoint can be compared with one from seeds.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from epdecode.batch import ExpertWeights, Fp8Rows, Rows
from epdecode.models import ModelShape
from epdecode.models.hf import load_hf, read_architecture
from epdecode.plan.model import BLOCK
from epdecode.weights.checkpoint import INDEX, SINGLE
from epdecode.weights.layout import LAYOUTS, MXFP4_GROUP, LayerKeys, scale_key
from epdecode.weights.mxfp4 import EXPONENT_BIAS
from epdecode.weights.seeded import SeededWeights, generator, part

Named = Iterator[tuple[str, torch.Tensor]]


def make(
    config: Path,
    folder: Path,
    *,
    layers: Sequence[int] = (),
    seed: int = 0,
    shards: int = 1,
    device: str = "cpu",
) -> dict[str, torch.Tensor]:
    """Write the folder and return what is in it.

    layers: the model's own numbers; its first two MoE layers where none is given.
    """
    shape, layout = load_hf(config), LAYOUTS[read_architecture(config)]
    folder.mkdir(parents=True, exist_ok=True)
    if config.resolve() != (folder / "config.json").resolve():
        shutil.copyfile(config, folder / "config.json")
    seeded = SeededWeights(_padded(shape), shape.expert_size, seed, torch.device(device))
    # Stands for all that a checkpoint holds and a MoE layer does not read.
    tensors = {"model.embed_tokens.weight": torch.zeros(8, shape.hidden, dtype=torch.bfloat16)}
    for number in layers or shape.moe_layers[:2]:
        tensors |= dict(_layer(LayerKeys(layout, "model.", number), shape, seeded))
    _write(folder, tensors, shards)
    return tensors


def _padded(shape: ModelShape) -> ModelShape:
    if shape.weight_format == "bf16":
        return shape
    return replace(shape, expert_size=-(-shape.expert_size // BLOCK) * BLOCK)


def _layer(keys: LayerKeys, shape: ModelShape, seeded: SeededWeights) -> Named:
    common = seeded.layer(keys.number, [])
    yield keys.norm, common.norm.cpu()
    yield keys.gate, common.gate.cpu()
    if common.bias is not None:
        yield keys.bias, common.bias.cpu()
    for ignored in keys.ignored:
        yield ignored, torch.zeros(1, dtype=torch.bfloat16)
    if keys.layout.mxfp4:
        yield from _mxfp4(keys, shape, seeded.seed)
        return
    for expert in range(shape.num_experts):
        made = seeded.experts(keys.number, [expert])
        yield from _expert(keys.matrices(expert), made, shape.expert_size)
    if common.shared is not None:
        yield from _expert(keys.matrices(None), common.shared, shape.shared_size)


def _expert(names: tuple[str, str, str], made: ExpertWeights, size: int) -> Named:
    """Gate, up and down apart and without the padding that a run has."""
    padded = _num_rows(made.gate_up) // 2
    hidden = _num_rows(made.down)
    gate, up, down = names
    yield from _matrix(gate, part(made.gate_up, 0, 0, padded), size, hidden)
    yield from _matrix(up, part(made.gate_up, 0, padded, 2 * padded), size, hidden)
    yield from _matrix(down, part(made.down, 0, 0, hidden), hidden, size)


def _matrix(name: str, rows: Rows, num_rows: int, columns: int) -> Named:
    if isinstance(rows, Fp8Rows):
        yield name, rows.data[:num_rows, :columns].contiguous().cpu()
        blocks = rows.scales[: -(-num_rows // BLOCK), : -(-columns // BLOCK)]
        yield scale_key(name), blocks.contiguous().cpu()
    else:
        yield name, rows[:num_rows, :columns].contiguous().cpu()


def _mxfp4(keys: LayerKeys, shape: ModelShape, seed: int) -> Named:
    """Random codes whose values have about unit gain: a code's mean square is 8.7."""
    for matrix, rows, columns in (
        ("gate_up_proj", 2 * shape.expert_size, shape.hidden),
        ("down_proj", shape.hidden, shape.expert_size),
    ):
        gen = generator(torch.device("cpu"), seed, keys.number, matrix)
        sizes = (shape.num_experts, rows, columns // MXFP4_GROUP)
        blocks, scales = keys.stacked(matrix)
        codes = (*sizes, MXFP4_GROUP // 2)
        yield blocks, torch.randint(0, 256, codes, dtype=torch.uint8, generator=gen)
        exponent = EXPONENT_BIAS - round(torch.tensor(8.7 * columns).log2().item() / 2)
        yield scales, torch.full(sizes, exponent, dtype=torch.uint8)


def _num_rows(rows: Rows) -> int:
    return (rows.data if isinstance(rows, Fp8Rows) else rows).shape[1]


def _write(folder: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
    if shards == 1:
        save_file(tensors, folder / SINGLE)
        return
    keys = list(tensors)
    share = -(-len(keys) // shards)
    names = [f"model-{shard + 1:05}-of-{shards:05}.safetensors" for shard in range(shards)]
    parts = [keys[shard * share : (shard + 1) * share] for shard in range(shards)]

    def save(shard: int) -> None:
        save_file({key: tensors[key] for key in parts[shard]}, folder / names[shard])

    with ThreadPoolExecutor(min(shards, 8)) as pool:
        list(pool.map(save, range(shards)))
    placed = {key: name for name, part_keys in zip(names, parts, strict=True) for key in part_keys}
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": placed}
    (folder / INDEX).write_text(json.dumps(index, indent=1))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("config", type=Path, help="a Hugging Face config.json")
    parser.add_argument("folder", type=Path, help="where the checkpoint goes")
    parser.add_argument("--layers", default="", help="the model's own numbers, as 3,4")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shards", type=int, default=2, help="files to spread the tensors over")
    parser.add_argument("--device", default="cpu", help="where the values are made: cpu or cuda")
    args = parser.parse_args()
    start = time.perf_counter()
    tensors = make(
        args.config,
        args.folder,
        layers=[int(number) for number in args.layers.split(",") if number],
        seed=args.seed,
        shards=args.shards,
        device=args.device,
    )
    size = sum(tensor.nbytes for tensor in tensors.values())
    took = time.perf_counter() - start
    print(f"{args.folder}: {len(tensors)} tensors, {size / 1e9:.2f} GB in {took:.1f} s")


if __name__ == "__main__":
    main()
