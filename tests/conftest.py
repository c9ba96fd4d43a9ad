"""Options and fixtures that every test may use. Devices are a fixture's business."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

GPU = "--gpu" in sys.argv or os.environ.get("EPDECODE_TEST_GPU") == "1"
if not GPU:
    # Read when a kernel is imported, so it must stand before any test module is.
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
else:
    os.environ["EPDECODE_TEST_GPU"] = "1"

import torch  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="run the tests marked gpu, and only those")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = config.getoption("--gpu")
    skip = pytest.mark.skip(reason="needs --gpu" if not wanted else "no gpu mark")
    for item in items:
        if (item.get_closest_marker("gpu") is not None) != bool(wanted):
            item.add_marker(skip)


@pytest.fixture
def device() -> torch.device:
    """CUDA with --gpu, else CPU (kernels then run in Triton's interpreter)."""
    return torch.device("cuda" if GPU else "cpu")


@pytest.fixture(autouse=True)
def _seed_and_poison(request: pytest.FixtureRequest) -> Iterator[None]:
    """Seed by the test's name; fresh memory holds NaN, so reading what nobody wrote fails."""
    digest = hashlib.sha256(request.node.nodeid.encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:4], "big"))
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
