"""The acceptance list's line on quality: FP8 and bf16 recommend as well as ``transformers`` in float32."""

from __future__ import annotations

from flashrec.request import ScoreSpace
from flashrec_harness.evaluation.engines import EngineSpec, parse_engine
from flashrec_harness.evaluation.suite import EvalSettings, command, compared, judged
from flashrec_harness.evaluation.testset import load_test_set
from flashrec_harness.outcome import Check, Outcome, SuiteContext
from flashrec_harness.references.dequantized import is_fp8

REFERENCE = parse_engine("transformers")
BF16 = parse_engine("flashrec:dtype=bfloat16")
FP8 = parse_engine("flashrec:dtype=bfloat16,quantization=fp8")
PAIRS = ((BF16, REFERENCE), (FP8, REFERENCE), (FP8, BF16))

QUICK_ROWS, ROWS = 200, 1000
"""Of N users that do not differ, an interval is 3 / N wide on either side: the bounds below are what N can show."""
QUICK_BOUND, FULL_BOUND = 0.02, 0.01
_N = 10
_LARGEST_CATALOG = 500_000


def run(context: SuiteContext) -> list[Check]:
    """A check per pair, on a sample of the held-out rows, in the score space that ``transformers`` has.

    An FP8 checkpoint is judged as it is: there is no bf16 of it beside the dequantised ``transformers``.
    """
    missing = _missing(context)
    if missing:
        return [Check("eval", "FP8, bf16 and transformers", Outcome.NOT_RUN, "nothing was compared", reason=missing)]
    settings = _settings(context, BF16, REFERENCE)
    test = load_test_set(context, settings.sample)
    if test.catalog.num_sids > _LARGEST_CATALOG:
        reason = f"{test.catalog.num_sids:,} semantic IDs; transformers' mask is made for up to {_LARGEST_CATALOG:,}"
        return [Check("eval", "FP8, bf16 and transformers", Outcome.NOT_RUN, "nothing was compared", reason=reason)]
    pairs = ((BF16, REFERENCE),) if is_fp8(context.model_path) else PAIRS
    specs = {str(spec): spec for pair in pairs for spec in pair}
    found = {name: judged(spec, context, test, settings)[0] for name, spec in specs.items()}
    checks = []
    for one, other in pairs:
        check = compared(found[str(one)], found[str(other)], test, settings, seed=context.seed)
        check.repeat = command(context, _settings(context, one, other))
        checks.append(check)
    return checks


def _settings(context: SuiteContext, one: EngineSpec, other: EngineSpec) -> EvalSettings:
    return EvalSettings(
        engine=one,
        versus=(other,),
        n=_N,
        space=ScoreSpace.VOCAB,
        trie=(True,),
        sample=QUICK_ROWS if context.quick else ROWS,
        bound=QUICK_BOUND if context.quick else FULL_BOUND,
    )


def _missing(context: SuiteContext) -> str:
    """What the comparison needs and this checkpoint does not have; empty if nothing."""
    if context.sid_vocab_file is None:
        return "needs a catalog; name one with --sid-vocab-file"
    sequences = context.sequences or context.model_path / "test.csv"
    return "" if sequences.is_file() else f"{sequences.name}: no held-out histories; name a file with --sequences"
