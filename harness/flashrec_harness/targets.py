"""From what a person names (a directory, a catalog, a URL) to a :class:`SuiteContext`."""

from __future__ import annotations

from pathlib import Path

_CATALOG_NAMES = ("catalog.json", "sid2pid.json", "sid2iid.json")


def resolve_catalog(model_path: Path, sid_vocab_file: Path | None) -> Path | None:
    """The catalog to use: the one named, else one that lies in the checkpoint's directory, else none."""
    if sid_vocab_file is not None:
        return sid_vocab_file
    beside = [model_path / name for name in _CATALOG_NAMES] + sorted(model_path.glob("*.index.json"))
    return next((path for path in beside if path.is_file()), None)


def resolve_model(model_path: Path | None) -> Path:
    """The checkpoint to judge: the one named, else the bundled tiny shop."""
    if model_path is not None:
        return model_path
    from flashrec.assets import tiny_shop

    return tiny_shop()


def display_path(path: Path) -> str:
    """A path for people and reports: relative to the working directory where it lies below it."""
    here = Path.cwd()
    return str(path.resolve().relative_to(here)) if path.resolve().is_relative_to(here) else str(path)
