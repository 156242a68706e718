"""Parity: the same choices and scores as SGLang, ``transformers`` and a float64 oracle."""
