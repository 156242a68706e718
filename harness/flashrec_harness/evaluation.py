"""How good a checkpoint's recommendations are on held-out histories: ``flashrec-harness eval``."""

from __future__ import annotations

from dataclasses import dataclass

from flashrec import Engine, EngineConfig, Request, Result
from flashrec.errors import CatalogError
from flashrec_harness import quality
from flashrec_harness.material import Material, Prompt, load_material
from flashrec_harness.outcome import SuiteContext

_CUTOFFS = (1, 3, 5, 10)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """``figures``: HR@k and NDCG@k. ``invalid_rate``: share of beams that name no SID of the catalog."""

    rows: int
    figures: dict[str, float]
    invalid_rate: float
    duplicate_rate: float


def evaluate(context: SuiteContext, *, n: int, limit: int | None = None) -> Evaluation:
    """Recommend ``n`` SIDs to each held-out user and see whether the target is among them.

    Raises :class:`CatalogError` without a catalog, or without histories that have targets.
    """
    material = load_material(context)
    if material.catalog is None:
        raise CatalogError("eval needs a catalog; name one with --sid-vocab-file")
    rows = [row for row in zip(material.histories, _prompts(material), strict=True) if row[0].target][:limit]
    if not rows:
        raise CatalogError(f"{material.sequences}: no row has a target_item_id")
    config = EngineConfig(
        model_path=context.model_path, sid_vocab_file=context.sid_vocab_file, sid=context.sid, max_beam_width=n
    )
    engine = Engine(config)
    try:
        results = engine.generate([Request(input_ids=prompt, n=n) for _, prompt in rows])
    finally:
        engine.close()
    return summarise(material, results, [str(history.target) for history, _ in rows], n)


def _prompts(material: Material) -> list[Prompt]:
    return material.history_prompts(len(material.histories))


def summarise(material: Material, results: list[Result], targets: list[str], n: int) -> Evaluation:
    """Hits are matches of the semantic ID, since several items may share one."""
    assert material.catalog is not None
    rankings = [[_rank(material, beam.sid) for beam in result.beams] for result in results]
    wanted = [int(material.catalog.ranks_of_items([target])[0]) for target in targets]
    beams = [rank for ranking in rankings for rank in ranking]
    repeated = sum(len(ranking) - len(set(ranking)) for ranking in rankings)
    cutoffs = [k for k in _CUTOFFS if k <= n]
    return Evaluation(
        rows=len(results),
        figures=quality.metrics(rankings, wanted, cutoffs),
        invalid_rate=sum(rank < 0 for rank in beams) / max(len(beams), 1),
        duplicate_rate=repeated / max(len(beams), 1),
    )


def _rank(material: Material, sid: tuple[int, ...] | None) -> int:
    assert material.catalog is not None
    return -1 if sid is None else int(material.catalog.rank([sid])[0])


def rows(found: Evaluation) -> list[dict[str, object]]:
    """The figures as table rows."""
    table: list[dict[str, object]] = [{"metric": name, "value": value} for name, value in found.figures.items()]
    return [
        *table,
        {"metric": "invalid rate", "value": found.invalid_rate},
        {"metric": "duplicate rate", "value": found.duplicate_rate},
    ]
