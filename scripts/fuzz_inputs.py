"""Damaged inputs by the thousand: every one must be taken or refused with our own error, in time.

python scripts/fuzz_inputs.py [--count 10000] [--seed 0]

Mutates the presets' YAML and the headers of a tiny checkpoint's safetensors files, and prints one
JSON object. Exit code 1 when anything but a UserError came out, or one took more than a second.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from epdecode.config.load import load_config  # noqa: E402
from epdecode.errors import UserError  # noqa: E402
from epdecode.weights.checkpoint import Checkpoint, check_layers  # noqa: E402

LIMIT_S = 1.0
TOKENS = [b": ", b"\n", b"- ", b"{", b"}", b"[", b"&a", b"*a", b"!!python", b"\t", b"1e999", b"~"]


def mutate(data: bytes, random_: random.Random) -> bytes:
    """A few edits: bytes flipped, dropped, repeated, moved, or tokens put in."""
    out = bytearray(data)
    for _ in range(random_.randint(1, 6)):
        at = random_.randrange(len(out) + 1)
        length = random_.randint(1, 20)
        kind = random_.randrange(5)
        if kind == 0 and out:
            out[at % len(out)] = random_.randrange(256)
        elif kind == 1:
            del out[at : at + length]
        elif kind == 2:
            out[at:at] = out[at : at + length] * random_.randint(1, 3)
        elif kind == 3:
            out[at:at] = random_.choice(TOKENS)
        else:
            out[at:at] = out[random_.randrange(len(out) + 1) :][:length]
    return bytes(out)


class Score:
    """What came of the inputs so far."""

    def __init__(self) -> None:
        self.taken = self.refused = 0
        self.slowest_s = 0.0
        self.bad: list[str] = []

    def attempt(self, read: Callable[[], object]) -> None:
        """Try one."""
        begun = time.perf_counter()
        try:
            read()
            self.taken += 1
        except UserError:
            self.refused += 1
        except Exception as error:  # noqa: BLE001 - finding these is the purpose
            self.bad.append(f"{type(error).__name__}: {error}"[:200])
        took = time.perf_counter() - begun
        self.slowest_s = max(self.slowest_s, took)
        if took > LIMIT_S:
            self.bad.append(f"{took:.1f} s")

    def summary(self) -> dict[str, object]:
        """For the JSON object."""
        return {"taken": self.taken, "refused": self.refused, "bad": self.bad[:5],
                "num_bad": len(self.bad), "slowest_s": round(self.slowest_s, 3)}  # fmt: skip


def fuzz_yaml(count: int, random_: random.Random, folder: Path) -> Score:
    """Mutated presets through the config loader."""
    texts = [path.read_bytes() for path in sorted((ROOT / "configs").glob("*.yaml"))]
    score, path = Score(), folder / "config.yaml"
    for _ in range(count):
        path.write_bytes(mutate(random_.choice(texts), random_))
        score.attempt(lambda: load_config(path))
    return score


def fuzz_safetensors(count: int, random_: random.Random, folder: Path) -> Score:
    """Mutated headers of a tiny DeepSeek-layout checkpoint, through opening and its checks."""
    spec = importlib.util.spec_from_file_location("maker", ROOT / "scripts/make_checkpoint.py")
    assert spec is not None
    assert spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    config = json.loads((ROOT / "tests/fixtures/hf/deepseek_v3/config.json").read_text())
    small = {"hidden_size": 128, "moe_intermediate_size": 128, "n_routed_experts": 4, "n_group": 1,
             "topk_group": 1, "num_experts_per_tok": 2, "num_hidden_layers": 4}  # fmt: skip
    source = folder / "config.json"
    source.write_text(json.dumps(config | small))
    whole = folder / "whole"
    maker.make(source, whole, layers=[3], seed=0, shards=1)
    file = next(whole.glob("*.safetensors"))
    data = file.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    damaged = folder / "damaged"
    shutil.copytree(whole, damaged)
    target, score = damaged / file.name, Score()
    for _ in range(count):
        target.write_bytes(mutate(data[:size], random_) + data[size:])

        def read() -> None:
            checkpoint = Checkpoint(damaged)
            check_layers(checkpoint, checkpoint.shape, [3])

        score.attempt(read)
    target.write_bytes(data)
    read()
    return score


def main() -> int:
    """Both kinds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    random_ = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        scores = {
            "yaml": fuzz_yaml(arguments.count, random_, folder),
            "safetensors": fuzz_safetensors(arguments.count, random_, folder),
        }
    print(json.dumps({kind: score.summary() for kind, score in scores.items()}, indent=1))
    return 1 if any(score.bad for score in scores.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
