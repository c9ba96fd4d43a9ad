"""A verification that only rounding can pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from epdecode.verify import fp8_tolerance, row_errors, tolerance
from tests.small import small_plan

ROWS, HIDDEN = 12, 256


def swap(rows: torch.Tensor) -> None:
    rows[[2, 5]] = rows[[5, 2]]


def zero(rows: torch.Tensor) -> None:
    rows[7] = 0


def double(rows: torch.Tensor) -> None:
    rows *= 2


def nan(rows: torch.Tensor) -> None:
    rows[3, 100] = torch.nan


def infinite(rows: torch.Tensor) -> None:
    rows[0, 0] = torch.inf


def one_element(rows: torch.Tensor) -> None:
    rows[4, 9] += 3 * rows[4].float().std()


def stale_row(rows: torch.Tensor) -> None:
    rows[6] = torch.randn(HIDDEN)


def missing_expert(rows: torch.Tensor) -> None:
    rows[1] *= 0.9


def small_scale_row(rows: torch.Tensor) -> None:
    """An absolute tolerance over the batch would not see this one."""
    rows[8] *= 1.5


FAULTS = [
    swap,
    zero,
    double,
    nan,
    infinite,
    one_element,
    stale_row,
    missing_expert,
    small_scale_row,
]


def expected_rows() -> torch.Tensor:
    rows = torch.randn(ROWS, HIDDEN).to(torch.bfloat16)
    rows[8] *= 1e-3
    return rows


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_every_kind_of_wrong_row_fails(fault: Callable[[torch.Tensor], None]) -> None:
    right = expected_rows()
    wrong = right.clone()
    fault(wrong)
    assert not row_errors(wrong, right).max() <= fp8_tolerance(HIDDEN)


def test_rounding_passes() -> None:
    right = torch.randn(ROWS, HIDDEN)
    assert row_errors(right.to(torch.bfloat16), right).max() <= tolerance(
        small_plan(1, "transport.wire=bf16")
    )


def test_a_row_that_must_be_zero_must_be_zero() -> None:
    right = expected_rows()
    right[2] = 0
    assert row_errors(right.clone(), right).max() == 0
    off = right.clone()
    off[2, 0] = 1e-6
    assert row_errors(off, right)[2] == torch.inf


def test_no_rows_have_no_error() -> None:
    assert row_errors(torch.zeros(0, 8), torch.zeros(0, 8)).numel() == 0


def test_nan_in_the_reference_never_passes() -> None:
    right = expected_rows()
    right[0, 0] = torch.nan
    assert row_errors(right.clone(), right)[0] == torch.inf
