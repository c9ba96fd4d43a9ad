"""The run folder and its files: whole or absent, whatever the disk or a signal does."""

import errno
import io
import json
import multiprocessing
import os
import random
import resource
import time

import pytest

from epdecode.errors import EnvironmentFault, NotSaved
from epdecode.result import save
from epdecode.result.save import RunFolder, atomic_write, save_json, save_result

FORK = multiprocessing.get_context("fork")


def make_folder(tmp_path):
    return RunFolder.create(tmp_path / "runs", "cpu tiny/x", "0123456789abcdef")


def test_name_and_parts(tmp_path):
    folder = make_folder(tmp_path)
    assert folder.path.parent == tmp_path / "runs"
    stamp, name, digest = folder.path.name.split("-")
    assert len(stamp) == len("20260131T120000Z")
    assert (name, digest) == ("cpu_tiny_x", "01234567")
    assert folder.log.is_dir()
    assert folder.trace.is_dir()
    assert [path.name for path in folder.path.iterdir() if path.is_file()] == []


def test_never_the_same_folder_twice(tmp_path):
    paths = {make_folder(tmp_path).path for _ in range(5)}
    assert len(paths) == 5


@pytest.mark.parametrize("name", ["", "..", "../../etc", "a" * 5 + "\n"])
def test_name_cannot_leave_the_root(tmp_path, name):
    folder = RunFolder.create(tmp_path, name, "0" * 16)
    assert folder.path.resolve().parent == tmp_path.resolve()


def test_root_that_is_a_file(tmp_path):
    (tmp_path / "runs").write_text("in the way")
    with pytest.raises(EnvironmentFault, match=r"--out: .*runs.* cannot be written: .*choose"):
        make_folder(tmp_path)


def test_root_that_is_read_only(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(tmp_path))

    monkeypatch.setattr(save.os, "open", refuse)
    with pytest.raises(EnvironmentFault, match="Read-only file system"):
        make_folder(tmp_path)


def test_too_little_room(tmp_path, monkeypatch):
    monkeypatch.setattr(save, "LEAST_FREE_BYTES", 1 << 60)
    with pytest.raises(EnvironmentFault, match="MiB free"):
        make_folder(tmp_path)


def test_join_finds_or_makes(tmp_path):
    folder = make_folder(tmp_path)
    assert RunFolder.join(folder.path) == folder
    elsewhere = RunFolder.join(tmp_path / "other_host" / folder.path.name)
    assert elsewhere.log.is_dir()


def test_atomic_write_replaces(tmp_path):
    path = tmp_path / "a.json"
    atomic_write(path, "old")
    atomic_write(path, "new")
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize("call", ["open", "write", "fsync"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, call, code):
    path = tmp_path / "a.json"
    atomic_write(path, "old")

    def fail(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(save.os, call, fail)
    with pytest.raises(OSError, match=os.strerror(code)):
        atomic_write(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_short_writes_are_continued(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(save.os, "write", lambda handle, data: real(handle, data[:3]))
    atomic_write(tmp_path / "a", "0123456789")
    assert (tmp_path / "a").read_text() == "0123456789"


def test_save_result_keeps_what_is_there(tmp_path):
    folder = make_folder(tmp_path)
    save_result(folder, '{"first": 1}\n')
    out = io.StringIO()
    with pytest.raises(NotSaved, match=r"File exists.*printed to stdout"):
        save_result(folder, '{"second": 2}\n', out)
    assert json.loads(folder.result.read_text()) == {"first": 1}
    assert json.loads(out.getvalue()) == {"second": 2}


def test_save_json_tells_of_a_full_disk(tmp_path):
    with pytest.raises(NotSaved, match="No such file"):
        save_json(tmp_path / "no" / "env.json", {})
    with pytest.raises(ValueError, match="not JSON compliant"):
        save_json(tmp_path / "env.json", {"x": float("nan")})


def _save_with_full_disk(folder, report):
    """A limit on file size is a disk that is full after 1 KiB, for a real write."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
    out = io.StringIO()
    try:
        save_result(folder, "x" * 5000, out)
    except NotSaved as error:
        report.send((int(error.exit_code), str(error), out.getvalue()))
    else:
        report.send((0, "", ""))


def test_full_disk_prints_the_result(tmp_path):
    folder = make_folder(tmp_path)
    here, there = FORK.Pipe()
    process = FORK.Process(target=_save_with_full_disk, args=(folder, there))
    process.start()
    code, message, printed = here.recv()
    process.join()
    assert code == 8
    assert "File too large" in message
    assert printed == "x" * 5000
    assert [path.name for path in folder.path.iterdir() if path.is_file()] == []


def _write_for_ever(path, ready):
    document = {"rows": list(range(5000))}
    for version in range(10**6):
        save_json(path, {"version": version, **document})
        ready.set()


def test_200_random_kills_leave_whole_files(tmp_path):
    rng = random.Random(0)
    for trial in range(200):
        path = tmp_path / f"{trial % 5}.json"
        ready = FORK.Event()
        process = FORK.Process(target=_write_for_ever, args=(path, ready))
        process.start()
        assert ready.wait(20)
        time.sleep(rng.random() * 0.005)
        process.kill()
        process.join()
        document = json.loads(path.read_text())
        assert document["rows"] == list(range(5000))
