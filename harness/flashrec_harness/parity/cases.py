"""The searches that are compared: widths 1 to 64, 1 to 6 tokens, stop tokens, catalogs, filters, penalties."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from flashrec.request import ScoreSpace
from flashrec_harness.parity.ground import CATALOG, CatalogGround, Ground
from flashrec_harness.references.types import SearchCase, Tokens

WIDTHS = (1, 2, 3, 4, 5, 7, 8, 10, 16, 20, 32, 48, 64)
STEPS = (1, 2, 3, 4, 5, 6)
_STOP_COUNTS = (3, 30, 12, 20, 40)
_STOP_PENALTIES = (0.0, 1.0, 0.5)
_FILTERED_SIDS = 2000
_PENALTIES = (1.0, 1.0, 0.0, 0.5, 2.0)

LikelyTokens = Callable[[Tokens, int], Tokens]
"""``(prompt, length)`` to that many tokens that a search from the prompt is likely to emit."""


def free_cases(ground: Ground, count: int, seed: int, likely: LikelyTokens) -> list[SearchCase]:
    """Searches without a catalog; two in five have stop tokens, of which some are sure to be reached.

    Half of the prompts end in the begin token where there is one, so that the search runs through items.
    """
    random = Random(seed)
    begin = next((catalog.vocabulary.begin for catalog in ground.catalogs.values()), None)
    cases = []
    for index in range(count):
        prompt = ground.prompts[index % len(ground.prompts)]
        if begin is not None and index % 2:
            prompt = (*prompt, begin)
        width = WIDTHS[index % len(WIDTHS)]
        steps = STEPS[(index // len(WIDTHS) + index) % len(STEPS)]
        stops: Tokens = ()
        if index % 5 in (1, 3):
            reached = random.sample(likely(prompt, 5), random.choice((1, 1, 2)))
            stops = tuple(sorted({*ground.eos, *reached}))
        cases.append(
            SearchCase(
                name=f"free-{index}",
                prompt=prompt,
                n=max(1, width - 1) if index % 7 == 3 else width,
                beam_width=width,
                max_tokens=steps,
                stop_token_ids=stops,
                length_penalty=_PENALTIES[index % len(_PENALTIES)],
            )
        )
    return cases


def stop_cases(ground: Ground, count: int, seed: int) -> list[SearchCase]:
    """Searches without a catalog and with three to forty stop tokens: banks fill, searches end early or run dry."""
    tokens = sorted({token for catalog in ground.catalogs.values() for token in catalog.vocabulary.all_tokens()})
    cases = []
    for index in range(count):
        stops = Random(f"{seed} stops {index}").sample(tokens, _STOP_COUNTS[index % len(_STOP_COUNTS)])
        width = 2 if index % 4 == 3 else WIDTHS[index % len(WIDTHS)]
        cases.append(
            SearchCase(
                name=f"stops-{index}",
                prompt=ground.prompts[index % len(ground.prompts)],
                n=width,
                beam_width=width,
                max_tokens=2 + index % 5,
                stop_token_ids=tuple(sorted({*ground.eos, *stops})),
                length_penalty=_STOP_PENALTIES[index % len(_STOP_PENALTIES)],
            )
        )
    return cases


def for_sglang(cases: Sequence[SearchCase]) -> list[SearchCase]:
    """The same searches with SGLang's rules for finished hypotheses; its length penalty is always 1."""
    return [replace(case, semantics="sglang", length_penalty=1.0) for case in cases]


def catalog_cases(
    ground: Ground,
    space: ScoreSpace,
    count: int,
    seed: int,
    *,
    catalog: str = CATALOG,
    filtered: bool = False,
    penalties: Sequence[float] = (1.0,),
    score_end: bool = False,
) -> list[SearchCase]:
    """Searches within a catalog; ``filtered`` gives two in three an exclude or an allow list.

    Every other prompt reaches the judged engine without the begin token, which it must append.
    """
    known = ground.catalogs[catalog]
    begin = known.vocabulary.begin
    cases = []
    for index in range(count):
        random = Random(f"{seed} {space} {catalog} {index}")
        prompt = ground.prompts[(index + seed) % len(ground.prompts)]
        width = WIDTHS[(index + seed) % len(WIDTHS)]
        exclude: tuple[Tokens, ...] = ()
        allow: tuple[Tokens, ...] | None = None
        if filtered and index % 3 == 1:
            exclude = tuple(random.sample(known.sids, _filter_size(known, 2)))
        elif filtered and index % 3 == 2:
            allow = tuple(random.sample(known.sids, _filter_size(known, 4)))
        cases.append(
            SearchCase(
                name=f"{catalog}-{space}{'-end' if score_end else ''}-{index}".replace(" ", "-"),
                prompt=prompt if begin is None else (*prompt, begin),
                n=max(1, width // 2) if index % 5 == 4 else width,
                beam_width=width,
                max_tokens=len(known.vocabulary.codebooks) + (known.vocabulary.end is not None),
                space=space,
                length_penalty=penalties[index % len(penalties)],
                catalog=catalog,
                implicit_begin=begin is not None and index % 2 == 0,
                score_end=score_end,
                exclude=exclude,
                allow=allow,
            )
        )
    return cases


def _filter_size(catalog: CatalogGround, share: int) -> int:
    """One in ``share`` of a small catalog; of a large one, as many as a client would send."""
    return min(_FILTERED_SIDS, max(1, len(catalog.sids) // share))
