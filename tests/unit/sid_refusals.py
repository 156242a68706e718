"""Reading malformed catalogs: one line with file, row and reason, and never anything but a FlashRecError."""

from __future__ import annotations

from pathlib import Path

import pytest
from sid_files import make_layout

from flashrec.errors import CatalogError, FlashRecError
from flashrec.sid.catalog import load_catalog
from flashrec.sid.peek import peek_depth

LAYOUT = make_layout(8, 8, 16)


def refusal(path: Path, content: str | bytes, layout: object = LAYOUT) -> str:
    """The message that reading ``content`` ends in."""
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(CatalogError) as caught:
        load_catalog(path, layout)  # type: ignore[arg-type]
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


def read_or_refuse(path: Path) -> None:
    """Both ways into the file, with and without a layout: a result or a one-line error, nothing else."""
    for read in (
        lambda: load_catalog(path, LAYOUT),
        lambda: load_catalog(path, None),
        lambda: peek_depth(path),
    ):
        try:
            read()
        except FlashRecError as error:
            message = str(error)
        else:
            continue
        assert message.startswith(f"{path}: ")
        assert "\n" not in message
