"""What of an answer is compared: token ids and the bits of both scores, over HTTP and in process."""

from __future__ import annotations

import orjson

from flashrec.request import BeamArrays
from flashrec_harness.determinism.records import OutputBeam, float_bits

Kept = dict[tuple[int, int], tuple[OutputBeam, ...]]
"""Share of the load and place in it -> the answer."""


def bits_of_json(content: bytes) -> tuple[OutputBeam, ...]:
    """Tokens and score bits of a ``/generate`` answer."""
    beams = orjson.loads(content)["meta_info"]["beam_results"]
    return tuple(
        OutputBeam(
            tuple(beam["output_ids"]),
            float_bits(beam["meta_info"]["cumulative_logprob"]),
            float_bits(beam["meta_info"]["sequence_score"]),
        )
        for beam in beams
    )


def bits_of_arrays(found: BeamArrays) -> tuple[OutputBeam, ...]:
    """The same of an answer in process."""
    return tuple(
        OutputBeam(tuple(tokens), float_bits(total), float_bits(score))
        for tokens, total, score in zip(
            found.token_ids.tolist(), found.cumulative_logprob.tolist(), found.score.tolist(), strict=True
        )
    )
