"""What is left of a run that broke: its samples become a result, with the cause in it."""

import io
import json
import os
from dataclasses import replace

import pytest

from epdecode.errors import NotSaved
from epdecode.result import Cause
from epdecode.result.document import from_json
from epdecode.result.partial import save_lost
from epdecode.result.samples import SampleWriter, read_samples
from epdecode.result.save import RunFolder
from epdecode.watch.beats import Verdict
from tests.documents import METHOD, make_result

LOST = Verdict(Cause(kind="died", rank=1, host="n", step=5, message="rank 1 is gone"), 6)
BLANK = make_result(timing=None, throughput=None, layer_floor=None, floors={}, step_counts=None)


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(tmp_path, "t", "0" * 16)


def measure(folder, steps):
    """Ranks 0, 1 ... did so many plain steps, and two instrumented ones each."""
    for rank, count in enumerate(steps):
        writer = SampleWriter(folder, rank)
        for step in range(count):
            writer.add("plain", step, 1000.0 + 100 * rank)
        for step in range(2):
            writer.add("instrumented", step, 1200.0, {"route": 10.0})
        writer.close()


def save(folder, blank=BLANK, verdict=LOST):
    out = io.StringIO()
    save_lost(folder, blank, verdict, out)
    return from_json(folder.result.read_text()), json.loads(out.getvalue())


def test_samples_become_the_result(folder):
    measure(folder, [6, 5, 6])
    result, line = save(folder)
    assert result.warnings == ("no samples of rank(s) [3]",)
    assert (result.status, result.cause) == ("failed", LOST.cause)
    assert (result.timing.step.n, result.timing.step.p50) == (5, 1200)
    assert result.timing.stages["route"].n == 6
    assert (result.step_counts.graph, result.step_counts.eager) == (7, 0)
    assert line["exit_code"] == 6
    assert line["result"] == str(folder.result)
    assert line["step_us_p50"] is None
    assert line["cause"]["rank"] == 1
    assert len(list(read_samples(folder))) == 6 + 5 + 6 + 6
    assert folder.parts.exists()


def test_nothing_measured_yet(folder):
    result, line = save(folder)
    assert result.timing is None
    assert line["status"] == "failed"


def test_a_signal_is_an_interruption(folder):
    verdict = Verdict(Cause(kind="interrupted", message="SIGINT"), 130)
    result, line = save(folder, verdict=verdict)
    assert result.status == "interrupted"
    assert line["exit_code"] == 130


def test_shared_gpu_keeps_its_silence(folder):
    measure(folder, [3])
    blank = replace(BLANK, method=replace(METHOD, shared_gpu=True))
    result, _ = save(folder, blank)
    assert result.timing is None
    assert result.step_counts.graph == 5


def test_full_disk(folder, monkeypatch):
    def full(*args):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("epdecode.result.save.os.write", full)
    out = io.StringIO()
    with pytest.raises(NotSaved):
        save_lost(folder, BLANK, LOST, out)
    *document, line = out.getvalue().splitlines()
    assert from_json("\n".join(document)).cause == LOST.cause
    assert json.loads(line)["result"] is None
