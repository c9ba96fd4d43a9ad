"""The parts are importable: the example in README.md, run as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_library_example_in_the_readme_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert example.count("\n") <= 16
    names: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), names)
    out, x = names["out"], names["x"]
    assert out.shape == x.shape
    assert bool(out.isfinite().all())
