"""What the search itself costs of a decode: head, expansion and trie against the model's layers."""

from __future__ import annotations

import re
from collections import defaultdict
from enum import StrEnum

from flashrec_harness.outcome import Check, Outcome
from flashrec_harness.tracing import analysis
from flashrec_harness.tracing import intervals as iv
from flashrec_harness.tracing.kernels import GRAPH_LAUNCH, KernelClass, classify
from flashrec_harness.tracing.reader import Event, RawTrace

NAME = "head, expansion and trie within their share"


class Part(StrEnum):
    """Whose kernel it is."""

    HEAD = "head"
    TRIE = "trie"
    AROUND = "around the selection"
    LAYERS = "layers"


_TRIE = re.compile(r"^(normalise|score|threshold|collect|place)_kernel$")
_AROUND = re.compile(r"^void at::native::|^[Mm]emcpy")
"""Small operations of PyTorch's and copies: the layers have none."""


def part_of(name: str) -> Part:
    """The part that a kernel inside a decode's graph belongs to. In an FP8 model only the head's product is bf16."""
    if _TRIE.match(name):
        return Part.TRIE
    if _AROUND.match(name):
        return Part.AROUND
    return Part.HEAD if classify(name) is KernelClass.BF16_GEMM else Part.LAYERS


def judge_share(trace: RawTrace, most: float, *, warmup_waves: int) -> Check:
    """Head, trie and what lies around them may take ``most`` of the device's time in the graphs of decodes."""
    parts = _microseconds(trace, warmup_waves)
    total = sum(parts.values())
    if not total:
        reason = "no decode graph with kernels is in the trace"
        return Check("trace", NAME, Outcome.NOT_RUN, "nothing to measure", reason=reason)
    if not parts[Part.HEAD]:
        reason = "no bf16 product in a decode's graph: of an FP8 checkpoint the head would be one"
        return Check("trace", NAME, Outcome.NOT_RUN, "the head cannot be told from the layers", reason=reason)
    share = 1 - parts[Part.LAYERS] / total
    return Check(
        "trace",
        NAME,
        Outcome.PASS if share <= most else Outcome.FAIL,
        f"{share:.2%} of decode (at most {most:.0%}): head {parts[Part.HEAD] / total:.2%}, "
        f"trie {parts[Part.TRIE] / total:.2%}, around them {parts[Part.AROUND] / total:.2%}",
        reason="" if share <= most else f"they take {share:.1%} of decode, {most:.0%} is allowed",
        rows=[{"part": str(part), "us": round(parts[part], 1), "share": f"{parts[part] / total:.2%}"} for part in Part],
        data={"share": share},
    )


def _microseconds(trace: RawTrace, warmup_waves: int) -> dict[Part, float]:
    """Device time by part: what a part's kernels cover. A kernel launched while the one before ends shares the overlap
    with it in no other's favour: parts that come later count from where the earlier one ended.
    """
    by_launch: defaultdict[int, list[Event]] = defaultdict(list)
    for event in trace.device:
        by_launch[event["args"].get("correlation", -1)].append(event)
    decode = analysis.windows(trace, analysis.DECODE, drop_first=warmup_waves)
    found = dict.fromkeys(Part, 0.0)
    for call in iv.inside(trace.runtime, decode):
        if call["name"] != GRAPH_LAUNCH:
            continue
        covered = 0.0
        for kernel in sorted(by_launch.get(call["args"].get("correlation", -2), []), key=lambda one: one["ts"]):
            start, end = iv.interval(kernel)
            found[part_of(kernel["name"])] += max(0.0, end - max(start, covered))
            covered = max(covered, end)
    return found
