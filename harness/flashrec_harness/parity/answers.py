"""Asks each reference for its lists, or says why it has none."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from flashrec_harness.outcome import Outcome
from flashrec_harness.parity.ground import Ground
from flashrec_harness.references.dequantized import is_fp8, plain_checkpoint
from flashrec_harness.references.logits import Float64Logits, float64_shortage
from flashrec_harness.references.oracle import Oracle
from flashrec_harness.references.sglang_http import SglangReference, trie_file_content
from flashrec_harness.references.types import RankedList, SearchCase, Searcher
from flashrec_harness.servers import ServerStartError
from flashrec_harness.sglang_env import URL_VARIABLE, SglangUnavailableError, named_url, sglang_server

_QUANTIZED = f"{URL_VARIABLE} names a server that may quantise activations; unset it to start one that does not"
_FOREIGN = f"{URL_VARIABLE} names a server that does not search in this catalog; unset it to start one that does"


@dataclass(frozen=True, slots=True)
class Absence:
    """A reference that gave no answer: ``NOT_RUN`` where it cannot run here, ``INVALID`` where it broke."""

    outcome: Outcome
    reason: str


class Answers:
    """What one side answered, by search."""

    def __init__(self) -> None:
        self.note = ""
        self._lists: dict[tuple[object, ...], RankedList] = {}
        self._absences: dict[tuple[object, ...], Absence] = {}

    def ask(self, searcher: Searcher, cases: Sequence[SearchCase]) -> None:
        for case, ranked in zip(cases, searcher.search(cases), strict=True):
            self._lists[case.search_key] = ranked

    def lack(self, cases: Sequence[SearchCase], absence: Absence) -> None:
        self._absences.update((case.search_key, absence) for case in cases)

    def absence(self, cases: Sequence[SearchCase]) -> Absence | None:
        """Why the first unanswered one of ``cases`` has no answer; ``None`` if all have one."""
        missing = (case.search_key for case in cases if case not in self)
        return next((self._absences[key] for key in missing), None)

    def lists(self, cases: Sequence[SearchCase]) -> list[RankedList]:
        return [self._lists[case.search_key] for case in cases]

    def __contains__(self, case: SearchCase) -> bool:
        return case.search_key in self._lists


def asked(searcher: Searcher, cases: Sequence[SearchCase]) -> Answers:
    """The answers of a side that is always there."""
    answers = Answers()
    answers.ask(searcher, cases)
    return answers


def ask_sglang(ground: Ground, cases: Sequence[SearchCase], out_dir: Path) -> Answers:
    """SGLang's lists from the server that the user named, or from one started here."""
    answers = Answers()
    if not cases:
        return answers
    url = named_url()
    if url is not None and is_fp8(ground.model_path):
        answers.lack(cases, Absence(Outcome.NOT_RUN, _QUANTIZED))
        return answers
    if url is not None:
        answers.lack([c for c in cases if c.catalog is not None], Absence(Outcome.NOT_RUN, _FOREIGN))
        cases = [case for case in cases if case.catalog is None]
    try:
        if url is not None:
            _ask_server(answers, url, ground, cases)
        else:
            with _own_server(ground, out_dir) as (own_url, retries):
                answers.note = "".join(f"; started again after {retry}" for retry in retries)
                _ask_server(answers, own_url, ground, cases)
    except SglangUnavailableError as error:
        answers.lack(cases, Absence(Outcome.NOT_RUN, f"SGLang: {error}"))
    except (ServerStartError, httpx.HTTPError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        answers.lack(cases, Absence(Outcome.INVALID, f"SGLang: {first}"))
    return answers


def ask_oracle(ground: Ground, cases: Sequence[SearchCase]) -> tuple[Answers, Oracle | None]:
    """The float64 oracle's lists, and the oracle itself for near-ties, if its weights fit into memory."""
    answers = Answers()
    shortage = float64_shortage(ground.model_path)
    if shortage:
        answers.lack(cases, Absence(Outcome.NOT_RUN, shortage))
        return answers, None
    oracle = Oracle(Float64Logits(ground.model_path), ground.grammar_of)
    answers.ask(oracle, cases)
    return answers, oracle


def _ask_server(answers: Answers, url: str, ground: Ground, cases: Sequence[SearchCase]) -> None:
    reference = SglangReference(url, ground.whole_grammars())
    try:
        answers.ask(reference, cases)
    finally:
        reference.close()


@contextmanager
def _own_server(ground: Ground, out_dir: Path) -> Iterator[tuple[str, list[str]]]:
    trie_file = _write_trie(ground, out_dir) if ground.catalogs else None
    with (
        plain_checkpoint(ground.model_path) as path,
        sglang_server(path, trie_file=trie_file, log_dir=out_dir) as server,
    ):
        yield server.url, server.retries


def _write_trie(ground: Ground, out_dir: Path) -> Path:
    """The file for SGLang's trie model."""
    path = out_dir / f"{ground.model_path.name}-trie.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(trie_file_content(ground.whole_grammars())), encoding="utf-8")
    return path
