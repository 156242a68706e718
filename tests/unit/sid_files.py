"""One small catalog in every spelling, and the layout and tokenizer that go with it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from flashrec.sid.catalog import Catalog
from flashrec.sid.layout import SidLayout

WORDS = {f"w{index}": index for index in range(10)}

Groups = dict[tuple[int, ...], list[str]]

GROUPS: Groups = {(0, 1, 2): ["ä", "b"], (0, 3, 0): ["c"], (7, 0, 9): ["10", "日本"]}
"""What every spelling below says: two items share a SID twice."""


def make_layout(*sizes: int, end: bool = True) -> SidLayout:
    """OneRec-style codebooks one behind the other, begin and end token last."""
    stops = np.cumsum(sizes)
    return SidLayout(
        codebooks=tuple(np.arange(stop - size, stop, dtype=np.int32) for size, stop in zip(sizes, stops, strict=True)),
        texts=tuple(tuple(f"<s_{'abcde'[level]}_{code}>" for code in range(size)) for level, size in enumerate(sizes)),
        begin=int(stops[-1]) if end else None,
        end=int(stops[-1]) + 1 if end else None,
        begin_text="<|sid_begin|>" if end else "",
        end_text="<|sid_end|>" if end else "",
    )


def groups(catalog: Catalog) -> Groups:
    return {tuple(sid): list(catalog.items_of(rank)) for rank, sid in enumerate(catalog.sids.tolist())}


def rows(of: Groups) -> list[tuple[tuple[int, ...], str]]:
    """(SID, item) pairs, the SIDs backwards and interleaved so that reading has something to sort."""
    rounds = range(max(map(len, of.values())))
    return [(sid, of[sid][turn]) for turn in rounds for sid in sorted(of, reverse=True) if turn < len(of[sid])]


def joined(sid: tuple[int, ...], prefix: str = "") -> str:
    return "".join(f"<{prefix}{'abcde'[level]}_{code}>" for level, code in enumerate(sid))


def table(of: Groups, separator: str, *, columns: bool = False, prefix: str = "") -> str:
    width = len(next(iter(of)))
    codes = [f"code_{level}" for level in range(width)] if columns else ["sid"]
    lines = [separator.join(["title", "item_id", *codes])]
    for sid, item in rows(of):
        cells = list(map(str, sid)) if columns else [joined(sid, prefix)]
        lines.append(separator.join([f"title of {item}", item, *cells]))
    return "\n".join(lines) + "\n"


def packed(of: Groups, base: int = 8192) -> dict[str, list[dict[str, object]]]:
    return {
        str((a * base + b) * base + c): [{"pid": item, "count": 3} for item in items] for (a, b, c), items in of.items()
    }


SPELLINGS = {
    "commas": json.dumps({",".join(map(str, sid)): items for sid, items in GROUPS.items()}),
    "commas with an end level": json.dumps({",".join(map(str, (*sid, 1))): items for sid, items in GROUPS.items()}),
    "index": json.dumps({item: [f"<{'abc'[i]}_{c}>" for i, c in enumerate(sid)] for sid, item in rows(GROUPS)}),
    "index of the other family": json.dumps(
        {item: [f"<s_{'abc'[i]}_{c}>" for i, c in enumerate(sid)] for sid, item in rows(GROUPS)}
    ),
    "packed": json.dumps(packed(GROUPS)),
    "tsv": table(GROUPS, "\t"),
    "csv": table(GROUPS, ",", prefix="s_"),
    "tsv of codes": table(GROUPS, "\t", columns=True),
    "csv of codes": table(GROUPS, ",", columns=True),
}


def write(path: Path, text: str, *, bom: bool = False, crlf: bool = False, zipped: bool = False) -> Path:
    data = text.replace("\n", "\r\n" if crlf else "\n").encode("utf-8-sig" if bom else "utf-8")
    path.write_bytes(gzip.compress(data) if zipped else data)
    return path


def make_tokenizer(added: list[str]) -> PreTrainedTokenizerFast:
    """A fast tokenizer of ten words, then ``added`` from token id 10 on, in this order."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(WORDS, unk_token="w0")))
    tokenizer.add_tokens(added, special_tokens=True)
    return tokenizer


def codebook_tokens(sizes: tuple[int, ...], prefix: str = "s_") -> list[str]:
    """The tokens of all codebooks, one level behind the other."""
    return [f"<{prefix}{'abcde'[level]}_{code}>" for level, size in enumerate(sizes) for code in range(size)]
