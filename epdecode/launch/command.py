"""``epdecode launch slurm``: a ready batch script from a config, printed or submitted."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from jinja2 import Environment, PackageLoader, StrictUndefined

from epdecode.config.load import find_preset, load_config, load_model
from epdecode.errors import EnvironmentFault
from epdecode.plan import make_plan
from epdecode.routing.load import read_recorded

TEMPLATE = "multinode.sbatch.j2"
GPUS_PER_NODE = 8
CPU_RANKS = 2

app = typer.Typer(
    help="Make batch scripts for schedulers.", add_completion=False, pretty_exceptions_enable=False
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the template fills in. Without ``config`` it is the general script of launch/."""

    name: str = "multinode.sbatch"
    config: str = ""
    arguments: str = ""
    """For epdecode.run, quoted for the shell."""
    job_name: str = "epdecode"
    nodes: int = 2
    ranks: int = 0
    gpus: int = 0
    time: str = "00:30:00"
    partition: str = ""
    account: str = ""
    container: str = ""
    """Image for pyxis, quoted for the shell."""


def render(job: Job) -> str:
    """The batch script."""
    environment = Environment(
        loader=PackageLoader("epdecode.launch"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(TEMPLATE).render(asdict(job))


@app.callback()
def _launch() -> None:
    """Keeps ``slurm`` a subcommand while it is the only one."""


@app.command()
def slurm(  # noqa: PLR0913 - each one is a command-line option
    config: Annotated[str, typer.Option("--config", "-c", help="A YAML file or a preset's name.")],
    nodes: Annotated[int, typer.Option("--nodes", "-N", min=1, help="Number of nodes.")] = 1,
    ranks_per_node: Annotated[
        int | None, typer.Option(min=1, help="Default: 8 (one per GPU), or 2 on CPU.")
    ] = None,
    time: Annotated[str, typer.Option(help="Time limit, as Slurm writes it.")] = "00:30:00",
    partition: Annotated[str, typer.Option(help="Slurm partition.")] = "",
    account: Annotated[str, typer.Option(help="Slurm account.")] = "",
    container: Annotated[str, typer.Option(help="Container image; needs the pyxis plugin.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print, do not submit.")] = False,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Config overrides.")
    ] = None,
) -> None:
    """A batch script for this config; its plan is checked for these nodes first."""
    path = find_preset(config)
    loaded = load_config(path, overrides or ())
    gpu = loaded.transport.name != "torch_a2a"
    ranks = ranks_per_node or (GPUS_PER_NODE if gpu else CPU_RANKS)
    make_plan(
        loaded,
        load_model(loaded.model, path),
        nodes * ranks,
        ranks_per_node=ranks,
        recorded=read_recorded(loaded, path),
    )
    shown = _from_here(path)
    script = render(
        Job(
            config=shown,
            arguments=shlex.join(["--config", shown, *(overrides or ())]),
            job_name=f"epdecode-{path.stem}",
            nodes=nodes,
            ranks=ranks,
            gpus=ranks if gpu else 0,
            time=time,
            partition=partition,
            account=account,
            container=shlex.quote(container) if container else "",
        )
    )
    if dry_run:
        typer.echo(script, nl=False)
    else:
        typer.echo(_submit(script))


def _from_here(path: Path) -> str:
    """The path as the job will see it from the folder it is submitted in."""
    full = path.resolve()
    return str(full.relative_to(Path.cwd())) if full.is_relative_to(Path.cwd()) else str(full)


def _submit(script: str) -> str:
    if shutil.which("sbatch") is None:
        raise EnvironmentFault("no sbatch on PATH: use --dry-run and submit the script elsewhere")
    child = subprocess.run(["sbatch"], input=script, capture_output=True, text=True, check=False)
    if child.returncode:
        raise EnvironmentFault(f"sbatch refused the job: {child.stderr.strip()}")
    return child.stdout.strip()
