"""``transformers`` beam search as the yardstick that is timed in the same run as the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flashrec.errors import CatalogError
from flashrec.request import ScoreSpace
from flashrec_harness.material import Material, Prompt
from flashrec_harness.outcome import SuiteContext
from flashrec_harness.perf import profiled
from flashrec_harness.perf.subjects import Outputs, Threads, digest_outputs
from flashrec_harness.perf.workload import Cell, Workload
from flashrec_harness.references.grammar import Grammar, SidVocabulary
from flashrec_harness.references.hugging_face import TransformersReference
from flashrec_harness.references.types import SearchCase


def catalog_grammar(material: Material) -> Grammar:
    """The catalog as the references hold it. Raises :class:`CatalogError` without a catalog."""
    if material.catalog is None or material.layout is None:
        raise CatalogError("the yardstick searches a catalog; name one with --sid-vocab-file")
    books = tuple(tuple(int(token) for token in book) for book in material.layout.codebooks)
    vocabulary = SidVocabulary(books, material.layout.begin, material.layout.end)
    return Grammar(map(tuple, material.catalog.sids.tolist()), vocabulary)


class TransformersSubject(Threads):
    """``generate(num_beams=n)`` on the same checkpoint and catalog, one request at a time."""

    def __init__(self, context: SuiteContext, workload: Workload, material: Material) -> None:
        self._requests = workload.reference_requests
        self._grammar = catalog_grammar(material)
        begin = self._grammar.vocabulary.begin
        self._begin = () if begin is None else (begin,)
        self._reference = TransformersReference(context.model_path, lambda _case: self._grammar)
        self._cell: Cell | None = None
        self._prompts: Sequence[Prompt] = ()
        self._outputs: Outputs = {}

    def prepare(self, cell: Cell, prompts: Sequence[Prompt], *, clients: int | None = None, keep: bool = True) -> None:
        self._cell, self._prompts, self._outputs = cell, prompts, {}

    def round_size(self, cell: Cell) -> int:
        return self._requests

    def generate(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.send(number)

    def send(self, number: int) -> None:
        assert self._cell is not None
        prompt = number % len(self._prompts)
        case = SearchCase(
            name=f"prompt {prompt}",
            prompt=(*self._prompts[prompt], *self._begin),
            beam_width=self._cell.n,
            n=self._cell.n,
            max_tokens=self._cell.max_tokens or self._grammar.depth,
            space=ScoreSpace.VOCAB,
            catalog="catalog",
        )
        self._outputs[prompt] = [list(found.token_ids) for found in self._reference.rank(case)]

    def flush(self) -> None:
        """``transformers`` keeps no prefix cache between calls."""

    def hit_rate(self) -> float | None:
        return 0.0

    def outputs_digest(self) -> str:
        return digest_outputs(self._outputs)

    def was_profiled(self) -> bool:
        return profiled.ever()

    def peak_gpu_mib(self) -> float | None:
        return None

    def configuration(self) -> dict[str, Any]:
        return {"implementation": "transformers generate", "dtype": "float32"}

    def close(self) -> None:
        self._prompts = ()
