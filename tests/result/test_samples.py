"""samples.jsonl: appended from a thread, whole lines only, merged at the end."""

import errno
import json
import multiprocessing
import os
import random
import time

import pytest

from epdecode.errors import NotSaved
from epdecode.result import samples
from epdecode.result.samples import SampleWriter, merge_samples, read_samples
from epdecode.result.save import RunFolder

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(tmp_path, "t", "0" * 16)


def fill(folder, rank, steps):
    writer = SampleWriter(folder, rank, interval_s=0.01)
    for step in range(steps):
        writer.add("plain", step, 10.5 * step, {"route": 1.0} if step % 2 else None)
    writer.close()


def test_written_merged_and_read(folder):
    for rank in (1, 0):
        fill(folder, rank, 5)
    assert len(list(read_samples(folder))) == 10
    merge_samples(folder)
    assert not folder.parts.exists()
    lines = [json.loads(line) for line in folder.samples.read_text().splitlines()]
    assert [(line["rank"], line["step"]) for line in lines] == [
        (rank, step) for rank in (0, 1) for step in range(5)
    ]
    assert lines[1] == {
        "rank": 0,
        "pass": "plain",
        "step": 1,
        "us": 10.5,
        "stages": {"route": 1.0},
    }
    assert list(read_samples(folder)) == lines


def test_on_disk_within_the_interval(folder):
    writer = SampleWriter(folder, 0, interval_s=0.02)
    writer.add("warmup", 0, 1.0)
    until = time.monotonic() + 10
    while not list(read_samples(folder)) and time.monotonic() < until:
        time.sleep(0.01)
    assert list(read_samples(folder)) == [{"rank": 0, "pass": "warmup", "step": 0, "us": 1.0}]
    writer.close()


def test_torn_last_line_is_left_out(folder):
    fill(folder, 0, 3)
    with (folder.parts / "rank00000.jsonl").open("a") as file:
        file.write('{"rank": 0, "st')
    assert [line["step"] for line in read_samples(folder)] == [0, 1, 2]
    merge_samples(folder)
    assert len(folder.samples.read_text().splitlines()) == 3


def test_full_disk_cuts_back_to_whole_lines(folder, monkeypatch):
    writer = SampleWriter(folder, 0, interval_s=60)
    writer.add("plain", 0, 1.0)
    writer.flush()

    def write_half(handle, data):
        os.write(handle, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(samples, "write_all", write_half)
    writer.add("plain", 1, 2.0)
    with pytest.raises(NotSaved, match="No space left"):
        writer.close()
    assert writer.path.read_bytes().endswith(b"\n")
    assert [line["step"] for line in read_samples(folder)] == [0]


def test_merge_on_a_full_disk_keeps_the_parts(folder, monkeypatch):
    fill(folder, 0, 3)

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(samples, "atomic_write", full)
    with pytest.raises(NotSaved, match=r"No space left.*the samples are in"):
        merge_samples(folder)
    assert len(list(read_samples(folder))) == 3


def test_nan_is_refused(folder):
    writer = SampleWriter(folder, 0)
    with pytest.raises(ValueError, match="not JSON compliant"):
        writer.add("plain", 0, float("nan"))
    writer.close()


def _write_until_killed(folder, ready):
    writer = SampleWriter(folder, 0, interval_s=0.001)
    for step in range(10**9):
        writer.add("plain", step, float(step))
        if step == 100:
            ready.set()
        if step % 50 == 0:
            time.sleep(0.0005)


def test_kills_keep_the_past(tmp_path):
    rng = random.Random(1)
    for trial in range(40):
        folder = RunFolder.create(tmp_path, f"k{trial}", "0" * 16)
        ready = FORK.Event()
        process = FORK.Process(target=_write_until_killed, args=(folder, ready))
        process.start()
        assert ready.wait(20)
        time.sleep(0.01 + rng.random() * 0.02)
        process.kill()
        process.join()
        steps = [line["step"] for line in read_samples(folder)]
        assert steps == list(range(len(steps)))
        assert steps
