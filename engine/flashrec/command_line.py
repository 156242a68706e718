"""What every command line is made with: its help is plain text in which nothing is cut."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from flashrec.console import log_columns

_HELP_COLUMNS = 120


class Commands(TyperGroup):
    """Commands that are listed with the whole first paragraph of their help."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Go on in the next line where a line would end with an ellipsis.

        The types are click's, of which newer versions of Typer have a private copy.
        """
        found = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        rows = [(name, _summary(command)) for name, command in found.items() if command and not command.hidden]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _summary(command: Any) -> str:
    return " ".join((command.short_help or command.help or "").partition("\n\n")[0].split())


def make_app(name: str, purpose: str) -> typer.Typer:
    """An application or a group of commands without any command yet; ``purpose`` heads its help.

    Typer's own help stands in boxes that cut the names of options at 80 columns.
    """
    context: dict[str, Any] = {
        "help_option_names": ["-h", "--help"],
        "max_content_width": _HELP_COLUMNS,
        "terminal_width": _HELP_COLUMNS if log_columns() else None,
    }
    return typer.Typer(
        name=name,
        help=purpose,
        cls=Commands,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings=context,
    )
