"""``flashrec demo``: recommendations from the bundled shop, on any machine, in seconds."""

from __future__ import annotations

import csv
from typing import Annotated

import typer
from rich.table import Table

from flashrec.assets import tiny_shop
from flashrec.config import EngineConfig
from flashrec.console import make_console
from flashrec.errors import ConfigError
from flashrec.request import Request
from flashrec.runtime.engine import Engine


def demo(
    user: Annotated[int, typer.Option(help="which held-out user of the bundled shop, from 0")] = 0,
    n: Annotated[int, typer.Option("-n", "--n", help="items to recommend")] = 10,
) -> None:
    """Show a user's history, what the bundled model recommends, and what the user did next."""
    shop = tiny_shop()
    with (shop / "test.csv").open(newline="", encoding="utf-8") as handle:
        rows = list(csv.DictReader(handle))
    if not 0 <= user < len(rows):
        raise ConfigError(f"user: {user} is outside 0 .. {len(rows) - 1}, the bundled shop's held-out users")
    row = rows[user]
    with (shop / "items.tsv").open(newline="", encoding="utf-8") as handle:
        items = {entry["item_id"]: entry for entry in csv.DictReader(handle, delimiter="\t")}
    engine = Engine(EngineConfig(model_path=shop, sid_vocab_file=shop / "catalog.json", device="cpu"))
    history = row["history_item_ids"].split()
    request = Request(input_ids=_prompt(engine, [items[item]["sid"] for item in history]), n=n)
    (result,) = engine.generate([request])
    console = make_console()
    console.print(f"user {row['user_id']} bought, oldest first:")
    for item in history:
        console.print(f"  {items[item]['title']}", highlight=False)
    table = Table("#", "score", "semantic ID", "item", title=f"what comes next, best of {n}")
    target, place = row["target_item_id"], "not among them"
    for rank, beam in enumerate(result.beams, start=1):
        if target in beam.items:
            place = f"number {rank}"
        titles = "; ".join(items[item]["title"] for item in beam.items)
        table.add_row(str(rank), f"{beam.score:.3f}", str(beam.sid), titles)
    console.print(table)
    console.print(f"bought next: {items[target]['title']} ({place})", highlight=False)


def _prompt(engine: Engine, sids: list[str]) -> tuple[int, ...]:
    """The prompt that the bundled model was trained on."""
    from flashrec.server.prompts import HistoryEntry, HistoryPrompt
    from flashrec.server.text import TextCodec

    codec = TextCodec(engine.tokenizer, engine.layout)
    return HistoryPrompt(None, codec).token_ids([HistoryEntry(sid=sid, codes=()) for sid in sids])
