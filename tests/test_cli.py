"""The side commands: exit codes, messages, lazy imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from epdecode import cli
from epdecode.config.load import configs_dir, load_config
from epdecode.errors import EnvironmentFault


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["epdecode", *args])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return int(left.value.code or 0)


def test_validate_prints_the_digest(monkeypatch, capsys):
    assert run(monkeypatch, "validate", "--config", "cpu-tiny", "layers=1") == 0
    assert ": ok, digest " in capsys.readouterr().out


def test_validate_reports_on_stderr_and_leaves_with_2(monkeypatch, capsys):
    assert run(monkeypatch, "validate", "-c", "cpu-tiny", "layers=0", "run.step=1") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "override 'layers=0': layers: got 0, accepted: a whole number >= 1" in err
    assert "run.step: unknown key" in err
    assert "Traceback" not in err


def test_validate_can_print_the_resolved_config(monkeypatch, capsys, tmp_path: Path):
    assert run(monkeypatch, "validate", "--print", "layers=1") == 0
    path = tmp_path / "x.yaml"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    assert load_config(path) == load_config("cpu-tiny", ["layers=1"])


def test_plan_prints_json(monkeypatch, capsys):
    args = ("plan", "-c", "deepseek_v3-h200x8-deepep_ll", "--world-size", "8", "--json")
    assert run(monkeypatch, *args) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["world_size"], plan["num_local_experts"]) == (8, 32)


def test_plan_refuses_with_2(monkeypatch, capsys):
    assert run(monkeypatch, "plan", "-n", "3") == 2
    assert capsys.readouterr().err.startswith("epdecode: ")


def test_presets_are_listed_with_what_they_are_for(monkeypatch, capsys):
    assert run(monkeypatch, "presets") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(
        p.stem for p in configs_dir().glob("*.yaml")
    )
    assert all(len(line.split(maxsplit=1)[1]) > 20 for line in lines)


@pytest.mark.parametrize(
    ("args", "file"),
    [(("schema",), "configs/schema.json"), (("schema", "--markdown"), "docs/config.md")],
)
def test_schema_prints_the_shipped_files(monkeypatch, capsys, args: tuple[str, ...], file: str):
    assert run(monkeypatch, *args) == 0
    shipped = (Path(cli.__file__).parents[1] / file).read_text(encoding="utf-8")
    assert capsys.readouterr().out == shipped


@pytest.mark.parametrize("args", [("plan", "--world-size", "0"), ("plam",), ("plan", "--wat")])
def test_a_wrong_command_line_leaves_with_2(monkeypatch, args: tuple[str, ...]):
    assert run(monkeypatch, *args) == 2


def test_every_command_has_help_and_an_example_or_a_module_of_its_own(monkeypatch, capsys):
    for command in cli.app.registered_commands:
        name = command.name or command.callback.__name__
        assert command.help or command.callback.__doc__
        assert name in cli.COMMANDS or command.epilog.startswith("Example: epdecode ")
    assert run(monkeypatch, "--help") == 0
    assert "validate" in capsys.readouterr().out


@pytest.fixture
def extra(tmp_path: Path, monkeypatch):
    """Two commands in a module of their own, added and taken away again."""
    (tmp_path / "extra_commands.py").write_text(
        "import typer\n"
        "from epdecode.errors import EnvironmentFault\n"
        "app = typer.Typer()\n"
        "@app.command()\n"
        "def one(word: str = 'none', code: int = 0) -> None:\n"
        "    '''Help of one.'''\n"
        "    print('word', word)\n"
        "    raise typer.Exit(code)\n"
        "@app.command()\n"
        "def two() -> None:\n"
        "    raise EnvironmentFault('no GPU')\n"
        "def plain(word: str) -> None:\n"
        "    print('plain', word)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    before = list(cli.app.registered_commands)
    cli.add_command("extra", "extra_commands:app", "A line.")
    cli.add_command("plain", "extra_commands:plain", "Another line.")
    yield
    cli.app.registered_commands[:] = before
    sys.modules.pop("extra_commands", None)


@pytest.mark.usefixtures("extra")
@pytest.mark.parametrize(
    ("args", "code", "out", "err"),
    [
        (("extra", "one", "--word", "hi"), 0, "word hi", ""),
        (("extra", "one", "--code", "4"), 4, "word none", ""),
        (("extra", "one", "--help"), 0, "Help of one.", ""),
        (("extra", "two"), 3, "", "epdecode: no GPU"),
        (("extra", "one", "--wat"), 2, "", "--wat"),
        (("plain", "hello"), 0, "plain hello", ""),
    ],
)
def test_commands_in_other_modules(monkeypatch, capsys, args, code: int, out: str, err: str):
    assert run(monkeypatch, *args) == code
    captured = capsys.readouterr()
    assert out in captured.out
    assert err in captured.err


@pytest.mark.usefixtures("extra")
def test_help_does_not_import_the_modules_of_other_commands(monkeypatch, capsys):
    assert run(monkeypatch, "--help") == 0
    assert "A line." in capsys.readouterr().out
    assert "extra_commands" not in sys.modules


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_listed_commands_exist(name: str):
    assert isinstance(cli._typer_app(cli.COMMANDS[name][0]), typer.Typer)


def test_exit_codes_are_those_of_the_errors(monkeypatch, capsys):
    def fail(*_: object) -> None:
        raise EnvironmentFault("nothing here")

    monkeypatch.setattr(cli, "load_config", fail)
    assert run(monkeypatch, "validate") == 3
    assert capsys.readouterr().err == "epdecode: nothing here\n"


def test_torch_is_not_imported():
    code = (
        "import sys; from epdecode import cli, plan; from epdecode.config import load; "
        "load.load_config(); load.load_model('tiny'); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
