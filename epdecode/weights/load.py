"""A layer's weights from a checkpoint: this rank's experts only, several files' pages at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import torch

from epdecode.batch import ExpertWeights, Fp8Rows, Rows
from epdecode.errors import ConfigError
from epdecode.models import ModelShape
from epdecode.weights.checkpoint import Checkpoint
from epdecode.weights.layout import LayerKeys, scale_key
from epdecode.weights.mxfp4 import dequantize_mxfp4
from epdecode.weights.seeded import LayerWeights, has_nan, put_expert, unwritten

MOST_THREADS = 8
CONVERTING_THREADS = 2
"""Each holds several float32 copies of a matrix on the device while it converts."""


class CheckpointWeights:
    """Reads layers of a checkpoint that ``check_layers`` has found to fit.

    model: the shape as it runs: its format and padded size are what is written; advance(bytes) is
    called, from several threads, as they are read. A context manager: its threads end with it.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        model: ModelShape,
        device: torch.device,
        advance: Callable[[int], None],
    ) -> None:
        self._checkpoint = checkpoint
        self._model = model
        self._device = device
        self._advance = advance
        as_stored = checkpoint.shape.weight_format == model.weight_format
        threads = MOST_THREADS if as_stored else CONVERTING_THREADS
        self._pool = ThreadPoolExecutor(
            min(threads, os.cpu_count() or 1), initializer=self._enter_thread
        )

    def _enter_thread(self) -> None:
        """A new thread starts on device 0, whichever device the process has chosen."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def __enter__(self) -> CheckpointWeights:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._checkpoint.close()

    def layer(self, number: int, local_experts: Sequence[int]) -> LayerWeights:
        """The model's layer ``number`` with these experts (global logical ids)."""
        keys, model = self._checkpoint.layer(number), self._model
        bias = self._plain(keys.bias, torch.float32) if model.router.bias else None
        shared = None
        if model.num_shared_experts:
            shared = self._experts(keys, model.shared_size, [None])
        return LayerWeights(
            norm=self._plain(keys.norm, torch.bfloat16),
            # With parallel.stand_in_ep the model's first experts stand for all.
            gate=self._plain(keys.gate, torch.bfloat16)[: model.num_experts].contiguous(),
            bias=bias if bias is None else bias[: model.num_experts].contiguous(),
            experts=self._experts(keys, model.expert_size, local_experts),
            shared=shared,
        )

    def _experts(self, keys: LayerKeys, size: int, names: Sequence[int | None]) -> ExpertWeights:
        made = unwritten(len(names), self._model, size, self._device)
        read = self._stacked if keys.layout.mxfp4 else self._separate

        def load(slot: int) -> None:
            gate, up, down = read(keys, names[slot])
            put_expert(made, slot, gate, up, down)

        for _ in self._pool.map(load, range(len(names))):
            """Raises what a thread raised."""
        self._refuse_nan(keys, made.gate_up, names, 0)
        self._refuse_nan(keys, made.down, names, 2)
        return made

    def _refuse_nan(
        self, keys: LayerKeys, rows: Rows, names: Sequence[int | None], matrix: int
    ) -> None:
        for slot in has_nan(rows).nonzero().flatten().tolist():
            key = keys.matrices(names[slot])[matrix]
            raise ConfigError(
                f"weights: {self._checkpoint.folder}: {key} (or what is stored with it) holds NaN "
                "or infinite values"
            )

    def _separate(self, keys: LayerKeys, expert: int | None) -> list[Rows]:
        return [self._matrix(key) for key in keys.matrices(expert)]

    def _matrix(self, key: str) -> Rows:
        data = self._on_device(self._checkpoint.tensor(key))
        if data.dtype != torch.float8_e4m3fn:
            return data
        scales = self._on_device(self._checkpoint.tensor(scale_key(key)))
        return Fp8Rows(data, scales.float())

    def _stacked(self, keys: LayerKeys, expert: int | None) -> list[Rows]:
        """Gate and up are the even and the odd rows of one matrix."""
        if expert is None:
            raise TypeError("stacked checkpoints have no shared expert")
        gate_up, down = (
            dequantize_mxfp4(*(self._on_device(self._checkpoint.part(key, expert)) for key in pair))
            for pair in (keys.stacked("gate_up_proj"), keys.stacked("down_proj"))
        )
        return [gate_up[0::2], gate_up[1::2], down]

    def _plain(self, key: str, dtype: torch.dtype) -> torch.Tensor:
        return self._on_device(self._checkpoint.tensor(key)).to(dtype, copy=True)

    def _on_device(self, mapped: torch.Tensor) -> torch.Tensor:
        """Pages of the file through pinned memory, where copies run at the full speed of PCIe."""
        self._advance(mapped.nbytes)
        if self._device.type == "cpu":
            return mapped
        return mapped.pin_memory().to(self._device, non_blocking=True)
