"""Repro bundles: saved, read back, replayed, and refused when the checkpoint has changed."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest

from flashrec import Engine, EngineConfig, Request, ScoreSpace
from flashrec_harness import repro


@pytest.fixture
def bundle_path(model_path: Path, tmp_path: Path) -> Path:
    checkpoint = tmp_path / "shop"
    shutil.copytree(model_path, checkpoint)
    catalog = json.loads((checkpoint / "catalog.json").read_text())
    first_sid = tuple(int(code) for code in next(iter(catalog)).split(","))
    config = EngineConfig(model_path=checkpoint, sid_vocab_file=checkpoint / "catalog.json", max_beam_width=4)
    request = Request(input_ids=(5, 6, 7), n=4, score_space=ScoreSpace.LEVEL, exclude_sids=(first_sid,))
    engine = Engine(config)
    (result,) = engine.generate([request])
    engine.close()
    return repro.save_bundle(
        tmp_path / "bundle.json", suite="parity", reason="rank 3 differs", request=request, config=config, result=result
    )


def test_a_replay_gives_the_same_bits(bundle_path: Path) -> None:
    bundle = repro.load_bundle(bundle_path)
    again = repro.replay(bundle)
    assert again == [dict(beam) for beam in bundle.observed]
    assert len(again) == 4
    assert all(row["same"] for row in repro.compare(bundle, again))
    assert isinstance(struct.unpack("<f", bytes.fromhex(again[0]["score_bits"]))[0], float)


def test_a_wrong_rank_is_named(bundle_path: Path) -> None:
    bundle = repro.load_bundle(bundle_path)
    observed = [dict(beam) for beam in bundle.observed]
    swapped = [observed[0], observed[2], observed[1]]
    rows = repro.compare(bundle, swapped)
    assert [row["same"] for row in rows] == [True, False, False, False]
    assert rows[3]["now"] is None


def test_a_changed_checkpoint_is_refused(bundle_path: Path) -> None:
    config = json.loads(bundle_path.read_text())["engine"]
    weights = Path(config["model_path"]) / "catalog.json"
    weights.write_text(weights.read_text() + "\n")
    with pytest.raises(repro.BundleError, match="catalog changed since the bundle was made"):
        repro.replay(repro.load_bundle(bundle_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a repro bundle: no JSON"),
        ("[]", "not a repro bundle of schema 1"),
        ("{}", "not a repro bundle of schema 1"),
        ('{"schema": 9}', "not a repro bundle of schema 1"),
        ('{"schema": 1, "suite": "x", "run_id": 3}', "lacks digests, .*, lacks request, has an unknown run_id"),
    ],
)
def test_what_is_not_a_bundle_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "b.json"
    path.write_text(text)
    with pytest.raises(repro.BundleError, match=message):
        repro.load_bundle(path)


def test_a_bundle_that_lost_a_field_is_damaged(bundle_path: Path) -> None:
    body = json.loads(bundle_path.read_text())
    bundle_path.write_text(json.dumps(body | {"wave": {"axis": "mixed", "requests": []}}))
    with pytest.raises(repro.BundleError, match="damaged repro bundle: its wave lacks at, lacks overrides"):
        repro.load_bundle(bundle_path)
    del body["engine"]
    bundle_path.write_text(json.dumps(body))
    with pytest.raises(repro.BundleError, match="damaged repro bundle: it lacks engine"):
        repro.load_bundle(bundle_path)
