"""What it takes to run an unmodified SGLang on a CPU: pinned requirements, a launcher, shims, a trie model.

The files here run inside SGLang's own environment (:mod:`flashrec_harness.sglang_env`), never in this one.
"""
