"""``flashrec generate``: ranked items for prompts, without a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.table import Table
from rich.text import Text

from flashrec.cli.flags import engine_config, with_flags
from flashrec.config import EngineConfig
from flashrec.console import make_console
from flashrec.errors import RequestError
from flashrec.request import Request, Result, ScoreSpace
from flashrec.runtime.engine import Engine


@with_flags(EngineConfig)
def generate(
    prompt: Annotated[list[str] | None, typer.Option(help="a prompt's text; may be repeated")] = None,
    input_ids: Annotated[
        list[str] | None, typer.Option(help="a prompt's token ids, comma-separated; may be repeated")
    ] = None,
    prompts_file: Annotated[Path | None, typer.Option(help="prompts, one per line")] = None,
    n: Annotated[int, typer.Option("-n", "--n", help="results per prompt")] = 10,
    beam_width: Annotated[int | None, typer.Option(help="beams kept while searching; default n")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="tokens to emit; default a semantic ID")] = None,
    temperature: Annotated[float, typer.Option(help="above 0: sample without replacement")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="seed of the sampling noise")] = None,
    length_penalty: Annotated[float, typer.Option(help="exponent of the length in the score")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object per prompt")] = False,
    **flags: Any,
) -> None:
    """Print ranked beams for each prompt, in the order given."""
    texts = [*(prompt or []), *(_lines(prompts_file) if prompts_file else [])]
    rows = [_ids(text) for text in input_ids or []]
    if not texts and not rows:
        raise RequestError("prompt", "give at least one --prompt, --input-ids or --prompts-file")
    engine = Engine(engine_config(flags))
    requests = [
        Request(
            input_ids=ids,
            n=n,
            beam_width=beam_width,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            length_penalty=length_penalty,
            rid=str(index),
        )
        for index, ids in enumerate([*map(engine.tokenize, texts), *rows])
    ]
    for result in engine.generate(requests):
        if as_json:
            typer.echo(orjson.dumps(as_dict(engine, result)).decode())
        else:
            make_console().print(as_table(engine, result))


def beam_text(engine: Engine, token_ids: tuple[int, ...]) -> str:
    """The beam's text, or its token ids where there is no tokenizer."""
    if engine.tokenizer is None:
        return " ".join(map(str, token_ids))
    text: str = engine.tokenizer.decode(token_ids)
    return text


def as_table(engine: Engine, result: Result) -> Table:
    """The beams of one prompt for a terminal."""
    space = ScoreSpace(result.score_space).value
    table = Table(title=Text(f"prompt {result.rid}: {result.prompt_tokens} tokens, scores in {space!r}"))
    for column in ("#", "score", "log-prob", "text", "items"):
        table.add_column(column, justify="right" if column in ("#", "score", "log-prob") else "left")
    for rank, beam in enumerate(result.beams, start=1):
        table.add_row(
            str(rank),
            f"{beam.score:.4f}",
            f"{beam.cumulative_logprob:.4f}",
            Text(beam_text(engine, beam.token_ids)),
            Text(", ".join(beam.items)),
        )
    return table


def as_dict(engine: Engine, result: Result) -> dict[str, Any]:
    """The beams of one prompt as JSON values."""
    return {
        "prompt": result.rid,
        "prompt_tokens": result.prompt_tokens,
        "cached_tokens": result.cached_tokens,
        "score_space": ScoreSpace(result.score_space).value,
        "beams": [
            {
                "token_ids": beam.token_ids,
                "text": beam_text(engine, beam.token_ids),
                "score": beam.score,
                "cumulative_logprob": beam.cumulative_logprob,
                "sid": beam.sid,
                "items": beam.items,
                "finish_reason": beam.finish_reason,
            }
            for beam in result.beams
        ],
    }


def _lines(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError("prompts_file", f"{path}: {error}") from None


def _ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise RequestError("input_ids", f"expected comma-separated integers, got {text!r}") from None
