"""What the engine is compared with: a float64 oracle, ``transformers``, and a live SGLang server."""

from flashrec_harness.references.types import Hypothesis, RankedList, SearchCase, Searcher

__all__ = ["Hypothesis", "RankedList", "SearchCase", "Searcher"]
