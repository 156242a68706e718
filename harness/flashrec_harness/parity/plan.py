"""Which searches are judged by which reference: the suite's agenda."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from flashrec.request import ScoreSpace
from flashrec_harness.parity.cases import LikelyTokens, catalog_cases, for_sglang, free_cases, stop_cases
from flashrec_harness.parity.ground import CATALOG, Ground
from flashrec_harness.references.types import SearchCase

_PENALTIES = (1.0, 0.0, 1.0, 0.5, 2.0)


class Reference(StrEnum):
    """What a list is compared with."""

    TRANSFORMERS = "transformers"
    SGLANG = "SGLang"
    ORACLE = "float64 oracle"


@dataclass(frozen=True, slots=True)
class Group:
    """Searches in one score space that the same references judge."""

    title: str
    space: ScoreSpace
    cases: tuple[SearchCase, ...]
    references: tuple[Reference, ...]

    def name(self, reference: Reference) -> str:
        return f"{reference}, {self.space}, {self.title}"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Lists per group. In full, 220 lists are compared with SGLang and with ``transformers``, 70 in a catalog."""

    free: int
    children: int
    vocab: int
    oracle: int
    scored_end: int
    edge: int
    stops: int


FULL = Sizes(free=150, children=70, vocab=39, oracle=39, scored_end=13, edge=5, stops=60)
QUICK = Sizes(free=39, children=26, vocab=13, oracle=13, scored_end=5, edge=2, stops=20)


def checkpoint_groups(ground: Ground, sizes: Sizes, seed: int, likely: LikelyTokens) -> list[Group]:
    """The agenda for a checkpoint: free search, and search in its catalog if it has one."""
    free = free_cases(ground, sizes.free, seed, likely)
    groups = [
        Group("no catalog", ScoreSpace.VOCAB, tuple(free), (Reference.TRANSFORMERS,)),
        Group("no catalog", ScoreSpace.VOCAB, tuple(for_sglang(free)), (Reference.SGLANG,)),
    ]
    if CATALOG not in ground.catalogs:
        return groups
    children = catalog_cases(ground, ScoreSpace.CHILDREN, sizes.children, seed)
    vocab = catalog_cases(ground, ScoreSpace.VOCAB, sizes.vocab, seed, filtered=True, penalties=_PENALTIES)
    groups += [
        Group("catalog", ScoreSpace.CHILDREN, tuple(children), (Reference.SGLANG, Reference.TRANSFORMERS)),
        Group("catalog and filters", ScoreSpace.VOCAB, tuple(vocab), (Reference.TRANSFORMERS,)),
    ]
    for space in ScoreSpace:
        filtered = catalog_cases(ground, space, sizes.oracle, seed + 1, filtered=True, penalties=_PENALTIES)
        scored = catalog_cases(ground, space, sizes.scored_end, seed + 2, score_end=True)
        title = "catalog, filters, end token"
        groups.append(Group(title, space, (*filtered, *scored), (Reference.ORACLE,)))
    return groups


def edge_groups(ground: Ground, sizes: Sizes, seed: int) -> list[Group]:
    """Every edge catalog in every score space, and free searches with many stop tokens."""
    stops = stop_cases(ground, sizes.stops, seed)
    judges = {
        ScoreSpace.CHILDREN: (Reference.ORACLE, Reference.SGLANG, Reference.TRANSFORMERS),
        ScoreSpace.VOCAB: (Reference.ORACLE, Reference.TRANSFORMERS),
    }
    return [
        _stop_group(Reference.TRANSFORMERS, stops),
        _stop_group(Reference.SGLANG, for_sglang(stops)),
        *(
            Group(
                "edge catalogs",
                space,
                tuple(_edge_cases(ground, space, sizes.edge, seed)),
                judges.get(space, (Reference.ORACLE,)),
            )
            for space in ScoreSpace
        ),
    ]


def _stop_group(reference: Reference, cases: Sequence[SearchCase]) -> Group:
    """Searches under the rules of ``reference`` for stop tokens."""
    return Group(f"stop tokens as {reference}", ScoreSpace.VOCAB, tuple(cases), (reference, Reference.ORACLE))


def _edge_cases(ground: Ground, space: ScoreSpace, count: int, seed: int) -> Iterable[SearchCase]:
    for index, catalog in enumerate(ground.catalogs):
        # Nine catalogs start at nine different widths; a step of three covers the rest.
        yield from catalog_cases(ground, space, count, seed + 3 * index, catalog=catalog)


def narrowed(groups: Sequence[Group], only: str | None) -> list[Group]:
    """What of ``groups`` has ``only`` in a comparison's name, as in ``float64 oracle, sid``; all of it for ``None``."""
    if only is None:
        return list(groups)
    left = (replace(group, references=tuple(r for r in group.references if only in group.name(r))) for group in groups)
    return [group for group in left if group.references]


def without(reference: Reference, groups: Sequence[Group]) -> list[Group]:
    """The groups that have other references than this one, for those."""
    left = (replace(group, references=tuple(r for r in group.references if r != reference)) for group in groups)
    return [group for group in left if group.references]


def unique(cases: Iterable[SearchCase]) -> list[SearchCase]:
    """The first of each set of cases that have the same answer."""
    found: dict[tuple[object, ...], SearchCase] = {}
    for case in cases:
        found.setdefault(case.search_key, case)
    return list(found.values())


def cases_for(groups: Sequence[Group], reference: Reference | None = None) -> list[SearchCase]:
    """The searches that ``reference`` answers, or all of them, without repetition."""
    return unique(
        case for group in groups if reference is None or reference in group.references for case in group.cases
    )
