"""scripts/offline_gpu.sh on the node without a network: installs once, never half."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def wheel(folder: Path, version: str = "1.0") -> Path:
    """A pure wheel: a module, and the library folder that LD_LIBRARY_PATH is for."""
    path = folder / f"demo-{version}-py3-none-any.whl"
    info = f"demo-{version}.dist-info"
    files = {
        "demo_module.py": f"VERSION = '{version}'\n",
        "nvidia/nvshmem/lib/libnvshmem_host.so.3": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: demo\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in files) + f"{info}/RECORD,,\n"
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def offline(tmp_path: Path, *arguments: str, **variables: str):
    base = {name: os.environ[name] for name in ("PATH", "HOME")}
    env = {**base, "EPDECODE_PYTHON": sys.executable, "TMPDIR": str(tmp_path), **variables}
    return subprocess.run(
        ["bash", str(ROOT / "scripts/offline_gpu.sh"), *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_exec_installs_once_and_sets_the_environment(tmp_path) -> None:
    wheel(tmp_path / "wheels")
    places = ("--wheels", str(tmp_path / "wheels"), "--site", str(tmp_path / "site"))
    show = (
        "import demo_module, json, os; print(json.dumps([demo_module.VERSION, dict(os.environ)]))"
    )
    done = offline(tmp_path, "exec", *places, "--", sys.executable, "-c", show)
    assert done.returncode == 0, done.stderr
    version, env = json.loads(done.stdout)
    assert version == "1.0"
    assert env["PYTHONPATH"].split(":") == [str(tmp_path / "site"), str(ROOT)]
    for name in ("DG_JIT_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert Path(env[name]).is_relative_to(tmp_path)
        assert Path(env[name]).is_dir()
    assert "not on this node" in done.stderr
    stamp = (tmp_path / "site/.stamp").stat().st_mtime_ns
    again = offline(tmp_path, "exec", *places, "--", "true")
    assert (again.returncode, again.stderr) == (0, "")
    assert (tmp_path / "site/.stamp").stat().st_mtime_ns == stamp


def test_exec_finds_the_nvshmem_of_site_packages(tmp_path) -> None:
    wheel(tmp_path / "wheels")
    places = ("--wheels", str(tmp_path / "wheels"), "--site", str(tmp_path / "site"))
    done = offline(
        tmp_path, "exec", *places, "--", "printenv", "LD_LIBRARY_PATH", LD_LIBRARY_PATH="/mine"
    )
    folders = done.stdout.strip().split(":")
    assert (Path(folders[0]) / "libnvshmem_host.so.3").exists()
    assert folders[1:] == ["/mine"]


def test_exec_gives_the_command_its_arguments_and_its_code(tmp_path) -> None:
    wheel(tmp_path / "wheels")
    command = ("sh", "-c", 'echo "$1"; exit 7', "sh", "--site x")
    done = offline(tmp_path, "exec", "--wheels", str(tmp_path / "wheels"), "--", *command)
    assert (done.stdout, done.returncode) == ("--site x\n", 7)


def test_another_wheel_is_installed(tmp_path) -> None:
    places = ("--wheels", str(tmp_path / "wheels"), "--site", str(tmp_path / "site"))
    wheel(tmp_path / "wheels").unlink()
    for version in ("1.0", "2.0"):
        for old in (tmp_path / "wheels").iterdir():
            old.unlink()
        wheel(tmp_path / "wheels", version)
        show = "import demo_module; print(demo_module.VERSION)"
        done = offline(tmp_path, "exec", *places, "--", sys.executable, "-c", show)
        assert done.stdout == f"{version}\n", done.stderr


def test_install_prints_what_a_shell_can_read(tmp_path) -> None:
    wheel(tmp_path / "wheels")
    arguments = ("--wheels", str(tmp_path / "wheels"), "--site", str(tmp_path / "si te"))
    done = offline(tmp_path, "install", *arguments)
    assert done.returncode == 0, done.stderr
    shown = subprocess.run(
        ["bash", "-c", f"{done.stdout}\nprintenv PYTHONPATH"],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.strip() == f"{tmp_path / 'si te'}:{ROOT}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["install", "--wheels", "/nonexistent"], "no wheels in /nonexistent"),
        (["exec"], "exec needs a command"),
        (["exec", "--wheel", "x"], "unknown option --wheel; accepted: --wheels DIR, --site DIR"),
        (["unpack"], "got 'unpack', accepted: fetch, install, exec"),
        ([], "got 'nothing'"),
    ],
)
def test_offline_refuses(tmp_path, arguments, message) -> None:
    done = offline(tmp_path, *arguments)
    assert done.returncode == 3
    assert message in done.stderr


def test_a_folder_of_somebody_else_is_not_replaced(tmp_path) -> None:
    wheel(tmp_path / "wheels")
    (tmp_path / "site").mkdir()
    (tmp_path / "site/thesis.txt").write_text("")
    done = offline(
        tmp_path, "install", "--wheels", str(tmp_path / "wheels"), "--site", str(tmp_path / "site")
    )
    assert done.returncode == 3
    assert "was not made by this script" in done.stderr
    assert (tmp_path / "site/thesis.txt").exists()


def test_a_broken_wheel_leaves_no_site(tmp_path) -> None:
    wheel(tmp_path / "wheels").write_text("not a zip")
    done = offline(
        tmp_path, "install", "--wheels", str(tmp_path / "wheels"), "--site", str(tmp_path / "site")
    )
    assert done.returncode == 3
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("site")] == [
        "site.lock"
    ]
