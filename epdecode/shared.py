"""The shared expert: every token of this rank through one more expert, added after combine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch

from epdecode.batch import ExpertWeights, Fp8Rows, MaskedBatch, Rows, no_mark
from epdecode.config import Config
from epdecode.experts import Experts, build_experts
from epdecode.kernels.fp8 import mn_major_scales, num_groups, quantize_ref
from epdecode.kernels.group_quant import group_quant
from epdecode.plan import Plan
from epdecode.plan.expert_site import shared_capacity
from epdecode.weights.seeded import LayerWeights

Fill = Callable[[torch.Tensor, Rows], None]
"""fill(normed, rows): bring normed [T, H] into the first T rows of the input buffer."""


class SharedExpert(Protocol):
    """Starts beside the dispatch, is added after the combine."""

    aside: bool
    """Runs while rows are under way; else in line with everything else."""

    def start(self, normed: torch.Tensor, num_tokens: torch.Tensor) -> None:
        """Begin on normed [T, H], of which num_tokens (int32 [1], on the device) are real."""
        ...

    def join(self) -> torch.Tensor | None:
        """Its output bfloat16 [T, H], once; None for a model that has no shared expert."""
        ...


class NoSharedExpert:
    """A model without shared experts."""

    aside = False

    def start(self, normed: torch.Tensor, num_tokens: torch.Tensor) -> None:
        """Nothing to do."""

    def join(self) -> None:
        """Nothing to add."""


class Lane(Protocol):
    """Where side work runs."""

    aside: bool
    """Beside what is enqueued after it."""

    def run(self, work: Callable[[], None]) -> None:
        """Start ``work`` after what is already enqueued."""
        ...

    def join(self) -> None:
        """Order what follows after the work."""
        ...


class SerialLane:
    """In line with everything else."""

    aside = False

    def run(self, work: Callable[[], None]) -> None:
        """See Lane."""
        work()

    def join(self) -> None:
        """See Lane."""


class StreamLane:
    """A CUDA stream of its own, forked from and joined to the current one; capturable."""

    aside = True

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def run(self, work: Callable[[], None]) -> None:
        """See Lane."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()

    def join(self) -> None:
        """See Lane."""
        torch.cuda.current_stream().wait_stream(self._stream)


class GroupedSharedExpert:
    """The shared expert as a grouped GEMM of one group, through the experts member itself.

    The count of real rows stays on the device, as in a MaskedBatch; all buffers are made once.
    """

    def __init__(
        self, experts: Experts, weights: ExpertWeights, rows: Rows, fill: Fill, lane: Lane
    ) -> None:
        self._experts = experts
        self._weights = experts.prepare(weights)
        self._rows = rows
        self._fill = fill
        self._lane = lane
        self.aside = lane.aside
        self._out: torch.Tensor | None = None

    def start(self, normed: torch.Tensor, num_tokens: torch.Tensor) -> None:
        """See SharedExpert."""

        def work() -> None:
            self._fill(normed, self._rows)
            batch = MaskedBatch(self._rows, num_tokens, normed.shape[0])
            self._out = self._experts(batch, self._weights, no_mark)[0, : normed.shape[0]]

        self._lane.run(work)

    def join(self) -> torch.Tensor:
        """See SharedExpert. Padded rows hold whatever the workspace did; nobody reads them."""
        self._lane.join()
        if self._out is None:
            raise RuntimeError("join before start")
        return self._out


def shared_maker(
    config: Config, plan: Plan, device: torch.device
) -> Callable[[LayerWeights], SharedExpert]:
    """One experts member of one group, its input buffer and its lane, used by all layers."""
    if not plan.model.shared_size:
        return lambda weights: NoSharedExpert()
    wide = replace(plan.model, expert_size=plan.model.shared_size)
    masked = replace(plan.transport, layout="masked", wire=_input_format(plan))
    loads = replace(plan.experts, loads=plan.experts.shared_loads)
    one = replace(plan, model=wide, num_local_experts=1, capacity=_rows(plan), transport=masked)
    experts = build_experts(replace(one, experts=loads), device)
    rows = _shared_rows(plan, device)
    fill = _fill(plan, device)
    lane = _lane(config, plan, device)

    def build_one(weights: LayerWeights) -> SharedExpert:
        if weights.shared is None:
            raise RuntimeError("the model has a shared expert but its weights are missing")
        return GroupedSharedExpert(experts, weights.shared, rows, fill, lane)

    return build_one


def _lane(config: Config, plan: Plan, device: torch.device) -> Lane:
    aside = config.overlap.shared_expert and not plan.experts.shared_in_line
    return StreamLane() if aside and device.type == "cuda" else SerialLane()


def _input_format(plan: Plan) -> str:
    """Its rows cross no wire: bfloat16 weights get them unquantised, whatever the wire is."""
    return plan.transport.wire if plan.model.weight_format == "fp8_block128" else "bf16"


def _rows(plan: Plan) -> int:
    return shared_capacity(plan.max_tokens)


def _shared_rows(plan: Plan, device: torch.device) -> Rows:
    shape = (1, _rows(plan), plan.model.hidden)
    if _input_format(plan) == "bf16":
        return torch.zeros(shape, dtype=torch.bfloat16, device=device)
    groups = num_groups(plan.model.hidden, "hidden")
    return Fp8Rows(
        torch.zeros(shape, dtype=torch.float8_e4m3fn, device=device),
        mn_major_scales(1, _rows(plan), groups, plan.experts.scale_format, device),
    )


def _fill(plan: Plan, device: torch.device) -> Fill:
    """How this rank's normed rows become the shared expert's input."""
    if _input_format(plan) == "bf16":
        return _copy_rows
    scale_format = plan.experts.scale_format

    def quantise(normed: torch.Tensor, rows: Rows) -> None:
        assert isinstance(rows, Fp8Rows)
        made = quantize_ref(normed, scale_format)
        rows.data[0, : normed.shape[0]] = made.data
        rows.scales[0, : normed.shape[0]] = made.scales

    def quantise_fused(normed: torch.Tensor, rows: Rows) -> None:
        assert isinstance(rows, Fp8Rows)
        tokens = normed.shape[0]
        out = Fp8Rows(rows.data[0, :tokens], rows.scales[0, :tokens])
        group_quant(normed, scale_format, "column", out)

    return quantise_fused if device.type == "cuda" else quantise


def _copy_rows(normed: torch.Tensor, rows: Rows) -> None:
    assert isinstance(rows, torch.Tensor)
    rows[0, : normed.shape[0]] = normed
