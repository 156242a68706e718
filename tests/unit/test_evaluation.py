"""``eval``: figures against a count by hand, on the bundled checkpoint's first users."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from flashrec import Engine, EngineConfig, Request
from flashrec.errors import CatalogError
from flashrec_harness.evaluation import evaluate
from flashrec_harness.material import load_material
from flashrec_harness.outcome import SuiteContext

USERS, WIDTH = 12, 5


def test_figures_equal_a_count_by_hand(suite_context: SuiteContext) -> None:
    found = evaluate(suite_context, n=WIDTH, limit=USERS)
    material = load_material(suite_context)
    engine = Engine(
        EngineConfig(
            model_path=suite_context.model_path, sid_vocab_file=suite_context.sid_vocab_file, max_beam_width=WIDTH
        )
    )
    hits, gain = 0, 0.0
    for history, prompt in zip(material.histories[:USERS], material.history_prompts(USERS), strict=True):
        (result,) = engine.generate([Request(input_ids=prompt, n=WIDTH)])
        places = [place for place, beam in enumerate(result.beams) if history.target in beam.items]
        hits += bool(places)
        gain += 1 / math.log2(places[0] + 2) if places else 0
    engine.close()
    assert found.rows == USERS
    assert found.figures["HR@5"] == pytest.approx(hits / USERS)
    assert found.figures["NDCG@5"] == pytest.approx(gain / USERS)
    assert "HR@10" not in found.figures
    assert (found.invalid_rate, found.duplicate_rate) == (0.0, 0.0)


def test_without_a_catalog_or_targets_it_is_a_usage_error(model_path: Path, tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="--sid-vocab-file"):
        evaluate(SuiteContext(model_path=model_path), n=1)
    rows = tmp_path / "histories.csv"
    rows.write_text("user_id,history_item_ids,target_item_id\nu,P0001,\n")
    context = SuiteContext(model_path=model_path, sid_vocab_file=model_path / "catalog.json", sequences=rows)
    with pytest.raises(CatalogError, match="no row has a target_item_id"):
        evaluate(context, n=1)
