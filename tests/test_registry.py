"""Members load only when chosen, and what stops them is said once, at the start."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from epdecode import session
from epdecode.errors import ConfigError, EnvironmentFault
from epdecode.registry import load_member
from epdecode.transport import MEMBERS

BROKEN = {
    "undefined symbol": "raise ImportError('deep_ep.so: undefined symbol: _ZN3c10')",
    "no message": "raise AssertionError",
    "cannot open shared object": "raise OSError('libnvshmem_host.so.3: cannot open shared object')",
}


@pytest.mark.parametrize("said", BROKEN)
def test_a_library_that_does_not_load_is_one_clear_error(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deep_ep.py").write_text(BROKEN[said])
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("deep_ep", "epdecode.transport.deepep_ll"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(EnvironmentFault) as error:
        load_member("transport", MEMBERS, "deepep_ll")
    assert "transport 'deepep_ll' cannot be loaded" in str(error.value)
    assert said in str(error.value)
    assert "epdecode doctor" in str(error.value)
    assert load_member("transport", MEMBERS, "torch_a2a"), "the plain member needs no library"


def test_an_unknown_name_comes_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'deepep_ll'"):
        load_member("transport", MEMBERS, "deepep_11")


@pytest.mark.parametrize(
    ("capability", "accepted"), [((8, 0), False), ((9, 0), True), ((10, 0), True), ((12, 1), False)]
)
def test_compute_capabilities(
    capability: tuple[int, int], accepted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    device = torch.device("cuda", 0)
    if accepted:
        assert session._found_device(device) is not None
        return
    with pytest.raises(EnvironmentFault, match=rf"compute capability {capability[0]}\."):
        session._found_device(device)
