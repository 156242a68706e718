"""Parity: the same choices and scores as SGLang, ``transformers`` and a float64 oracle."""

from flashrec_harness.parity.suite import run

__all__ = ["run"]
