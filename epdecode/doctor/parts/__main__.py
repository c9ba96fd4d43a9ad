"""One rank of one part: ``python -m epdecode.doctor.parts NAME`` with torchrun's environment."""

from __future__ import annotations

import dataclasses
import json
import os
import sys

from torch._C._distributed_c10d import PrefixStore

from epdecode.doctor.parts import PARTS
from epdecode.launch.env import read_launch
from epdecode.registry import load_member
from epdecode.world import choose_device, join, leave, open_store


def main(name: str) -> None:
    """Join, run the part, print its outcome as the last line, leave."""
    part = PARTS[name]
    launch = read_launch(os.environ)
    store = PrefixStore(name, open_store(launch, part.limit_s))
    device = choose_device(launch.local_rank, cpu=part.gpu == "unused")
    world = join(launch, store, device, part.limit_s)
    outcome = load_member("doctor", {name: part.member}, name)(world)
    sys.stdout.write("\n" + json.dumps(dataclasses.asdict(outcome)) + "\n")
    sys.stdout.flush()
    leave()


if __name__ == "__main__":
    main(sys.argv[1])
