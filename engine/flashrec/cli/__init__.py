"""``flashrec serve | generate | demo | doctor | catalog``. A user's mistake is one line and exit code 2."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from rich.console import Console

import flashrec
from flashrec.catalog_cli import app as catalog_app
from flashrec.cli import demo, doctor, generate
from flashrec.cli.flags import engine_config, with_flags
from flashrec.command_line import make_app
from flashrec.config import EngineConfig
from flashrec.errors import FlashRecError
from flashrec.logs import configure_logging

app = make_app("flashrec", "Beam-search inference for generative recommendation.")
app.add_typer(catalog_app)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"flashrec {flashrec.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    configure_logging()


@app.command(name="serve")
@with_flags(EngineConfig, server=True)
def serve(**flags: Any) -> None:
    """Serve a checkpoint over HTTP: SGLang's /generate, OpenAI's /v1, /v1/recommend, /metrics."""
    try:
        from flashrec.front.serve import serve as run_server
        from flashrec.server.config import ServerConfig
    except ModuleNotFoundError as error:
        raise FlashRecError(f"serve: {error.name} is not installed; pip install 'flashrec[serve]'") from None
    server_fields = ServerConfig.__dataclass_fields__
    chosen = {name: value for name, value in flags.items() if name in server_fields and value is not None}
    engine = {name: value for name, value in flags.items() if name not in server_fields}
    raise typer.Exit(run_server(engine_config(engine), ServerConfig(**chosen)))


app.command(name="generate")(generate.generate)
app.command(name="demo")(demo.demo)
app.command(name="doctor")(doctor.doctor)


def main() -> None:
    """Run the command line; a :class:`FlashRecError` becomes one line on stderr and exit code 2."""
    try:
        app()
    except FlashRecError as error:
        Console(stderr=True, soft_wrap=True, markup=False, highlight=False).print(f"flashrec: {error}")
        sys.exit(2)
