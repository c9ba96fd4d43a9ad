"""The ``epdecode`` command: what surrounds a run. torch is not imported here."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from epdecode.config import Config
from epdecode.config.load import (
    configs_dir,
    digest,
    find_preset,
    load_config,
    load_model,
    resolved_yaml,
)
from epdecode.errors import Exit, UserError
from epdecode.models import ModelShape

# Commands with modules of their own: name -> ("module:typer app or function", line in the help).
COMMANDS: dict[str, tuple[str, str]] = {
    "doctor": (
        "epdecode.doctor.command:doctor",
        "Find what would keep a job from running here; exit code 3 on any FAIL.",
    ),
    "env": ("epdecode.envinfo:env", "Print versions, GPUs, network and variables, for a report."),
    "routing": (
        "epdecode.routing.command:app",
        "Look at recorded routes: imbalance per layer and rank, as a table and a picture.",
    ),
    "bench": (
        "epdecode.bench.command:app",
        "Measure kernels, experts and what each improvement is worth, beside their floors.",
    ),
    "launch": ("epdecode.launch.command:app", "Write or submit a Slurm job that fits a config."),
    "report": (
        "epdecode.report.commands:report_command",
        "Print a result as tables, or write it as a page or as metrics.",
    ),
    "compare": (
        "epdecode.report.commands:compare_command",
        "Put results side by side with the first of them.",
    ),
    "status": ("epdecode.result.status:status_command", "Say how a run is doing, or how it ended."),
}

app = typer.Typer(
    help="Size, check and examine runs of the MoE decode layer. The run itself is started with "
    "`torchrun --nproc-per-node N -m epdecode.run --config X`.",
    epilog="Exit codes: 0 ok, 1 a bug here, 2 config or command line, 3 environment.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigOption = Annotated[
    str | None,
    typer.Option("--config", "-c", help="A YAML file or a preset's name. Default: cpu-tiny."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, such as batch.tokens_per_rank=64."),
]


@app.command(epilog="Example: epdecode validate -c my.yaml transport.wire=bf16")
def validate(
    config: ConfigOption = None,
    overrides: Overrides = None,
    show: Annotated[bool, typer.Option("--print", help="Print the resolved config.")] = False,
) -> None:
    """Check a config and its model; report every mistake at once (exit code 2)."""
    loaded, model = _load(config, overrides)
    if show:
        typer.echo(resolved_yaml(loaded, find_preset(config)), nl=False)
        return
    typer.echo(f"{find_preset(config)}: ok, digest {digest(loaded, model)[:8]}")


@app.command(epilog="Example: epdecode plan -c deepseek_v3-h200x8-deepep_ll --world-size 8 --json")
def plan(  # noqa: PLR0913 - each one is a command-line option
    config: ConfigOption = None,
    overrides: Overrides = None,
    world_size: Annotated[int, typer.Option("--world-size", "-n", min=1, help="Ranks.")] = 1,
    ranks_per_gpu: Annotated[int, typer.Option(min=1, help="Ranks that share a GPU.")] = 1,
    ranks_per_node: Annotated[
        int | None, typer.Option(min=1, help="Ranks of a node. Default: all on one.")
    ] = None,
    redundant: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Compare placements with so many redundant experts; repeatable."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Placement, buffer bytes, memory and floors of a run, without a GPU; checks every limit."""
    from epdecode.plan import make_plan, render, to_json
    from epdecode.plan.placement_study import render_study, study, usual_counts
    from epdecode.routing.load import read_recorded

    loaded, model = _load(config, overrides)
    recorded = read_recorded(loaded, find_preset(config))
    plan_for = partial(
        make_plan,
        model=model,
        world_size=world_size,
        ranks_per_gpu=ranks_per_gpu,
        ranks_per_node=ranks_per_node,
        recorded=recorded,
    )
    made = plan_for(loaded)
    counts = redundant or usual_counts(made.model.num_experts, world_size, loaded.experts.redundant)
    wanted = redundant or loaded.experts.placement != "contiguous" or recorded.any
    choices = study(loaded, plan_for, counts) if wanted else []
    if as_json:
        document = to_json(made) | {"placements": [asdict(choice) for choice in choices]}
        typer.echo(json.dumps(document, indent=2, allow_nan=False))
        return
    typer.echo(render(made))
    if choices:
        typer.echo("\n" + render_study(choices, made.placement.load))


@app.command(epilog="Example: epdecode presets")
def presets() -> None:
    """List the configs that come with epdecode, one line each."""
    files = sorted(configs_dir().glob("*.yaml"), key=lambda file: file.stem)
    width = max((len(file.stem) for file in files), default=0)
    for file in files:
        typer.echo(f"{file.stem:{width}}  {_summary(file)}")


@app.command(epilog="Example: epdecode schema > configs/schema.json")
def schema(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print docs/config.md instead of the JSON Schema.")
    ] = False,
) -> None:
    """Print the JSON Schema of a config, for editors."""
    from epdecode.config.docs import config_markdown, schema_text

    typer.echo(config_markdown() if markdown else schema_text(), nl=False)


def add_command(name: str, target: str, line: str) -> None:
    """Add a command whose module is imported only when it is called, help included."""

    def command(context: typer.Context) -> None:
        real = _typer_app(target)
        code = real(args=context.args, prog_name=f"epdecode {name}", standalone_mode=False)
        if isinstance(code, int):
            raise typer.Exit(code)

    settings = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    app.command(name, help=line, context_settings=settings)(command)


for _name, (_target, _line) in COMMANDS.items():
    add_command(_name, _target, _line)


def main() -> None:
    """Run the command line; a UserError ends with its message and exit code, not a traceback."""
    try:
        app(prog_name="epdecode")
    except UserError as error:
        sys.stderr.write(f"epdecode: {error}\n")
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader (head, less) has gone: not an error, and nothing may be written any more.
        sys.stderr.close()
        sys.exit(Exit.OK)


def _typer_app(target: str) -> typer.Typer:
    module, _, attribute = target.partition(":")
    real = getattr(importlib.import_module(module), attribute)
    if isinstance(real, typer.Typer):
        return real
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    single.command()(real)
    return single


def _load(config: str | None, overrides: list[str] | None) -> tuple[Config, ModelShape]:
    loaded = load_config(config, overrides or ())
    return loaded, load_model(loaded.model, near=find_preset(config))


def _summary(file: Path) -> str:
    """The first comment of a preset that is not the editor's."""
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("# ") and not line.startswith("# yaml-language-server"):
            return line.removeprefix("# ")
    return ""


if __name__ == "__main__":
    main()
