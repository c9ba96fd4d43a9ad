"""The shapes of `epdecode bench kernels`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

Shape = Mapping[str, int | str]
"""Key -> value as written on the command line: E=32,M=1024,I=2048,live=512,load=skew."""

SMALL = {"E": 4, "M": 8, "T": 6, "live": 11, "I": 512, "H": 512, "R": 6, "K": 2}
"""Most that a dimension keeps under the interpreter."""

SWIGLU_SIZES = (
    (32, 1024, 2048, 64),
    (32, 1024, 2048, 512),
    (32, 1024, 2048, 1024),
    (16, 2048, 2048, 1024),
    (9, 2048, 2048, 1024),
    (8, 4096, 2048, 1024),
    (2, 16384, 2048, 1024),
    (16, 1024, 1536, 1024),
    (16, 1024, 768, 1024),
    (256, 128, 2048, 1024),
)
"""Experts, capacity, expert size, valid rows: shares of DeepSeek-V3, Qwen3-235B and Qwen3-30B."""
ROWS = ((1, 7168), (128, 7168), (128, 2048), (1024, 7168), (16384, 7168))
"""Tokens, hidden size."""
TARGETS = (("fp32", "row"), ("fp32", "column"), ("ue8m0", "column"))
"""Scale format, layout."""
ROUTERS = (("deepseek-v3", 256), ("qwen3", 128), ("gpt-oss", 128))
"""Rule, experts."""
GATES = (("deepseek-v3", 256, 7168), ("qwen3", 128, 2048))
"""Rule, experts, hidden: gate product and router together."""


def default_shapes() -> Iterator[tuple[str, Shape]]:
    """Every (op, shape) of the table."""
    for (experts, capacity, size, live), load in product(SWIGLU_SIZES, ("even", "skew")):
        yield "swiglu_quant", _swiglu(experts, capacity, size, live, load=load)
    yield "swiglu_quant", _swiglu(32, 1024, 2048, 1024, load="one")
    yield "swiglu_quant", _swiglu(32, 1024, 2048, 1024, load="even", scales="ue8m0")
    yield "swiglu_quant", _swiglu(32, 1024, 2048, 16384, load="even")
    for (tokens, hidden), (scales, layout) in product(ROWS, TARGETS):
        yield "group_quant", {"T": tokens, "H": hidden, "scales": scales, "layout": layout}
    for tokens, (rule, num_experts) in product((1, 128, 1024), ROUTERS):
        yield "router", {"T": tokens, "experts": num_experts, "rule": rule}
    for tokens, (rule, experts, hidden) in product((1, 128), GATES):
        yield "gate", {"T": tokens, "experts": experts, "H": hidden, "rule": rule}
    for tokens in (1, 128, 1024):
        yield "rms_norm", {"T": tokens, "H": 7168}
        yield "add_rms_norm", {"T": tokens, "H": 7168}
    for received, op in product((128, 1024, 8192), ("pack", "unpack_weighted")):
        yield op, {"R": received, "E": 32, "K": 4, "H": 7168}


def _swiglu(experts: int, capacity: int, size: int, live: int, **more: str) -> Shape:
    return {"E": experts, "M": capacity, "I": size, "live": live, **more}


def shrunk(shape: Shape) -> Shape:
    """The shape with every dimension small enough for the interpreter."""
    return {
        key: min(value, SMALL.get(key, value)) if isinstance(value, int) else value
        for key, value in shape.items()
    }
