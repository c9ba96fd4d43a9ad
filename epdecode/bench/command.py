"""`epdecode bench`: its sub-commands."""

from __future__ import annotations

import typer

from epdecode.bench.experts import experts
from epdecode.bench.kernels import kernels
from epdecode.bench.ladder import ladder
from epdecode.bench.layer import layer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("kernels")(kernels)
app.command("experts")(experts)
app.command("ladder")(ladder)
app.command("layer")(layer)


@app.callback()
def bench() -> None:
    """Measure the product's parts apart from the layer, each beside its floor."""
