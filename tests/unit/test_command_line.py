"""Help is whole at any width: no option's name is cut, and no command's purpose ends in dots."""

from __future__ import annotations

import re
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from flashrec import cli
from flashrec.command_line import make_app
from flashrec_harness import cli as harness_cli

APPS = {"flashrec": cli.app, "flashrec-harness": harness_cli.app}


def _help(app: typer.Typer, *arguments: str, columns: int) -> str:
    done = CliRunner().invoke(app, [*arguments, "--help"], terminal_width=columns, max_content_width=columns)
    assert done.exit_code == 0, done.output
    return done.output


def _commands(command: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    inner = getattr(command, "commands", {})
    return [(path, command), *(pair for name, one in inner.items() for pair in _commands(one, (*path, name)))]


@pytest.mark.parametrize("name", APPS)
@pytest.mark.parametrize("columns", [50, 80, 120])
def test_every_option_and_every_purpose_is_whole(name: str, columns: int) -> None:
    commands = _commands(typer.main.get_command(APPS[name]))
    assert len(commands) >= 8
    for path, command in commands:
        words = " ".join(_help(APPS[name], *path, columns=columns).split())
        for option in command.params:
            assert all(text in words for text in option.opts if text.startswith("-")), (path, option.opts)
        for inner in getattr(command, "commands", {}).values():
            first = " ".join(inner.help.partition("\n\n")[0].split())
            assert first.replace("- ", "-") in words.replace("- ", "-"), (path, first)


def test_a_hidden_command_is_not_listed_and_a_short_help_is_taken() -> None:
    app = make_app("tool", "What the tool is for.")
    app.command("seen", short_help="in short")(lambda: None)
    app.command("unseen", hidden=True)(lambda: None)
    text = _help(app, columns=80)
    assert "What the tool is for." in text
    assert re.search(r"^  seen +in short$", text, re.MULTILINE)
    assert "unseen" not in text
