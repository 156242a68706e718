"""``flashrec catalog``: look at a catalog, check it against a checkpoint, convert it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.table import Table

from flashrec.command_line import make_app
from flashrec.console import make_console
from flashrec.errors import CatalogError, CheckpointError
from flashrec.sid.catalog import Catalog, load_catalog
from flashrec.sid.codes import RECIF_BASE, RECIF_DEPTH, Packing
from flashrec.sid.layout import SidLayout, infer_layout
from flashrec.sid.peek import peek_depth
from flashrec.sid.stats import CatalogStats, catalog_stats
from flashrec.sid.trie import Trie, build_trie
from flashrec.sid.writers import CatalogFormat, format_of, write_catalog

app = make_app("catalog", "Look at, check and convert catalogs of semantic IDs.")

CatalogFile = Annotated[Path, typer.Argument(help="A catalog in any format: JSON, index, TSV, CSV, Parquet.")]
ModelPath = Annotated[Path | None, typer.Option(help="Checkpoint whose tokenizer the codes must fit.")]
Sid = Annotated[str | None, typer.Option(help="START:END/SIZE,SIZE,...: overrides the tokenizer's codebooks.")]
Packed = Annotated[bool, typer.Option("--packed", help="Keys are packed integers, whatever they look like.")]
Base = Annotated[int, typer.Option(min=2, help="Codes per level of packed integers.")]
Depth = Annotated[int, typer.Option(min=1, max=16, help="Levels of packed integers.")]


@app.command()
def stats(
    file: CatalogFile,
    model_path: ModelPath = None,
    sid: Sid = None,
    packed: Packed = False,
    base: Base = RECIF_BASE,
    depth: Depth = RECIF_DEPTH,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Depth, branching per level, collisions, codes used."""
    catalog, layout = _load(file, model_path, sid, Packing(base, depth) if packed else None)
    figures = catalog_stats(catalog, _trie(catalog, layout))
    if as_json:
        typer.echo(json.dumps(asdict(figures)))
    else:
        _print(file, figures)


@app.command()
def check(
    file: CatalogFile,
    model_path: ModelPath = None,
    sid: Sid = None,
    packed: Packed = False,
    base: Base = RECIF_BASE,
    depth: Depth = RECIF_DEPTH,
) -> None:
    """Read every row; exit with 2 and file, row and reason if one is bad."""
    catalog, layout = _load(file, model_path, sid, Packing(base, depth) if packed else None)
    against = "no checkpoint" if layout is None else f"codebooks of {','.join(map(str, layout.sizes))}"
    typer.echo(
        f"{file}: {catalog.num_sids} semantic IDs of {catalog.depth} levels, {catalog.num_items} items, "
        f"{catalog.duplicates} repeated rows; checked against {against}"
    )


@app.command()
def convert(
    file: CatalogFile,
    out: Annotated[Path, typer.Argument(help="File to write; .gz compresses.")],
    to: Annotated[CatalogFormat | None, typer.Option(help="Format; default: what the name says.")] = None,
    model_path: ModelPath = None,
    sid: Sid = None,
    packed: Packed = False,
    base: Base = RECIF_BASE,
    depth: Depth = RECIF_DEPTH,
    code_columns: Annotated[bool, typer.Option("--code-columns", help="Tables: code_0, code_1, ... not sid.")] = False,
    end_level: Annotated[bool, typer.Option("--end-level", help="JSON: append the end token as a last level.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that is there.")] = False,
) -> None:
    """Convert a catalog, read the result back, and compare the two."""
    there = os.path.exists(out)  # Path.exists raises where it may not look
    if there and not overwrite:
        raise CatalogError(f"{out}: exists already; name another file, or replace it with --overwrite")
    catalog, layout = _load(file, model_path, sid, Packing(base, depth) if packed else None)
    kind = to or format_of(out)
    packing = Packing(base, catalog.depth) if kind is CatalogFormat.PACKED else None
    write_catalog(catalog, out, kind, layout=layout, packing=packing, code_columns=code_columns, end_level=end_level)
    sizes = layout.sizes if layout is not None else _sizes(catalog)
    try:
        written = load_catalog(out, layout, sid_sizes=sizes, packing=packing)
        if written.digest != catalog.digest:
            raise CatalogError(f"{out}: read back, it differs from {file}: this format cannot hold these item ids")
    except CatalogError:
        if not there:
            out.unlink()  # or it would be in the next try's way
        raise
    lost = " (titles left out: JSON has no place for them)" if catalog.titles and not written.titles else ""
    typer.echo(
        f"{out}: {kind.value}, {written.num_sids} semantic IDs, {written.num_items} items, "
        f"digest {written.digest}{lost}"
    )


def _load(
    file: Path, model_path: Path | None, sid: str | None, packing: Packing | None
) -> tuple[Catalog, SidLayout | None]:
    if model_path is None:
        if sid is not None:
            raise CatalogError("--sid needs --model-path: token ids belong to a tokenizer")
        return load_catalog(file, None, packing=packing), None
    depth = peek_depth(file, packing=packing)
    layout = infer_layout(_tokenizer(model_path), depth=depth, override=sid)
    return load_catalog(file, layout, packing=packing), layout


def _tokenizer(model_path: Path) -> object:
    from transformers import AutoTokenizer

    if not model_path.is_dir():
        raise CheckpointError(f"{model_path}: no such checkpoint directory")
    try:
        return AutoTokenizer.from_pretrained(model_path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{model_path}: cannot load the tokenizer: {reason}") from error


def _sizes(catalog: Catalog) -> tuple[int, ...]:
    """Codebook sizes of a catalog without a checkpoint: as large as its codes need."""
    return tuple(int(size) for size in np.max(catalog.sids, axis=0) + 1)


def _trie(catalog: Catalog, layout: SidLayout | None) -> Trie:
    return build_trie(catalog.sids, layout.sizes if layout is not None else _sizes(catalog))


def _print(file: Path, figures: CatalogStats) -> None:
    typer.echo(f"{file}: {figures.num_sids:,} semantic IDs of {figures.depth} levels, {figures.num_items:,} items")
    for line in (
        f"{figures.shared_sids:,} IDs name several items: {figures.sharing_items:,} items, "
        f"at most {figures.largest_group} under one ID",
        f"{figures.repeated_items:,} items stand under several IDs; {figures.duplicate_rows:,} rows repeated",
        f"end level: {_yes(figures.has_end_level)}; titles: {_yes(figures.has_titles)}",
        f"trie on a device: {figures.device_bytes / 1e6:.2f} MB; content digest {figures.digest}",
    ):
        typer.echo(f"  {line}")
    table = Table("level", "codebook", "used", "nodes", "mean", "median", "max", "one", "kept")
    table.caption = "codes used; children per node: mean, median, most, nodes with one; how a device keeps them"
    for number, level in enumerate(figures.levels):
        table.add_row(
            str(number),
            f"{level.codebook_size:,}",
            f"{level.codes_used:,}",
            f"{level.nodes:,}",
            f"{level.mean_children:.2f}",
            f"{level.median_children:g}",
            f"{level.max_children:,}",
            f"{level.single_child_nodes:,}",
            "dense" if level.dense else "CSR",
        )
    make_console().print(table)


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"
