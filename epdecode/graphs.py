"""EagerStep and GraphStep: the whole loop of layers as one call over padded static inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from epdecode.batch import Mark, no_mark
from epdecode.clock import Clock, Recorder
from epdecode.errors import UserError
from epdecode.layer import LayerTrace, MoELayer


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Static inputs of a step, at the size of the largest bucket; a bucket uses the first rows.

    hidden: bfloat16 [B, H]; num_tokens: int32 [1]; forced: per layer (ids int64 [B, K], weights
    float32 [B, K]) when routes are given from outside, else empty.
    """

    hidden: torch.Tensor
    num_tokens: torch.Tensor
    forced: tuple[tuple[torch.Tensor, torch.Tensor], ...]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One rank's tokens of one step, on the device: hidden [n, H] and a route per layer or none."""

    hidden: torch.Tensor
    forced: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()


def fill(inputs: StepInputs, batch: StepBatch, bucket: int) -> None:
    """Bring a batch into the static inputs; padded rows get zeros and expert id -1."""
    tokens = batch.hidden.shape[0]
    inputs.hidden[:tokens].copy_(batch.hidden)
    inputs.hidden[tokens:bucket].zero_()
    inputs.num_tokens.fill_(tokens)
    for (ids, weights), (new_ids, new_weights) in zip(inputs.forced, batch.forced, strict=True):
        ids[:tokens].copy_(new_ids)
        ids[tokens:bucket].fill_(-1)
        weights[:tokens].copy_(new_weights)


def choose_bucket(buckets: Sequence[int], most_tokens: int) -> int:
    """The smallest bucket that holds the largest rank's tokens.

    Raises UserError when none does.
    """
    for bucket in buckets:
        if bucket >= most_tokens:
            return bucket
    raise UserError(f"a batch of {most_tokens} tokens; the largest bucket is {max(buckets)}")


@dataclass(frozen=True, slots=True)
class StepOutput:
    """hidden: bfloat16 [bucket, H] after the last layer; traces: one a layer."""

    hidden: torch.Tensor
    traces: tuple[LayerTrace, ...]


Align = Callable[[], None]
"""Lines the ranks up on the device in front of an instrumented step, so that its stages hold no
wait for a rank that began late."""


def nothing() -> None:
    """No alignment."""


class Step(Protocol):
    """Runs all layers on the static inputs."""

    kind: str
    """eager or graph: how the steps really run."""
    inputs: StepInputs

    def __call__(self, bucket: int) -> StepOutput:
        """Enqueue the step of this bucket; its outputs are overwritten by its next call."""
        ...

    def instrumented(self, bucket: int) -> tuple[StepOutput, Recorder]:
        """The same step with stage stamps."""
        ...


def run_layers(
    layers: Sequence[MoELayer], inputs: StepInputs, bucket: int, mark: Mark
) -> StepOutput:
    """All layers in order: hidden states evolve from one to the next."""
    hidden = inputs.hidden[:bucket]
    normed = layers[0].norm(hidden)
    traces = []
    for layer in layers:
        end, trace = layer(hidden, normed, inputs.num_tokens, mark)
        hidden, normed = end.hidden, end.normed
        traces.append(trace)
    return StepOutput(hidden, tuple(traces))


class EagerStep:
    """Every kernel launched from the host."""

    kind = "eager"

    def __init__(
        self,
        layers: Sequence[MoELayer],
        inputs: StepInputs,
        clock: Clock,
        mark: Mark = no_mark,
        align: Align = nothing,
    ) -> None:
        self.inputs = inputs
        self._layers = layers
        self._clock = clock
        self._mark = mark
        self._align = align

    def __call__(self, bucket: int) -> StepOutput:
        """See Step."""
        return run_layers(self._layers, self.inputs, bucket, self._mark)

    def instrumented(self, bucket: int) -> tuple[StepOutput, Recorder]:
        """See Step."""
        recorder = self._clock.recorder()

        def mark(stage: str) -> None:
            recorder.mark(stage)
            self._mark(stage)

        self._align()
        recorder.start()
        return run_layers(self._layers, self.inputs, bucket, mark), recorder


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    output: StepOutput
    recorder: Recorder


class GraphStep:
    """One CUDA graph a bucket, plain and instrumented, in one memory pool.

    Capture the largest bucket first, so that the smaller ones reuse its memory. Every layer makes
    two low-latency calls, so each graph holds an even number of them and the halves of DeepEP's
    buffer stand as they stood before.
    """

    kind = "graph"

    def __init__(
        self,
        layers: Sequence[MoELayer],
        inputs: StepInputs,
        clock: Clock,
        buckets: Sequence[int],
        align: Align = nothing,
    ) -> None:
        self.inputs = inputs
        self._layers = layers
        self._clock = clock
        self._align = align
        self._pool = torch.cuda.graph_pool_handle()
        self._plain: dict[int, _Captured] = {}
        self._stamped: dict[int, _Captured] = {}
        for bucket in sorted(buckets, reverse=True):
            self._plain[bucket] = self._capture(bucket, stamped=False)
            self._stamped[bucket] = self._capture(bucket, stamped=True)

    def _capture(self, bucket: int, *, stamped: bool) -> _Captured:
        graph = torch.cuda.CUDAGraph()
        recorder = self._clock.recorder()
        with torch.cuda.graph(graph, pool=self._pool):
            if stamped:
                self._align()
                recorder.start()
            mark = recorder.mark if stamped else no_mark
            output = run_layers(self._layers, self.inputs, bucket, mark)
        return _Captured(graph, output, recorder)

    def __call__(self, bucket: int) -> StepOutput:
        """See Step."""
        captured = self._plain[bucket]
        captured.graph.replay()
        return captured.output

    def instrumented(self, bucket: int) -> tuple[StepOutput, Recorder]:
        """See Step."""
        captured = self._stamped[bucket]
        captured.graph.replay()
        return captured.output, captured.recorder
