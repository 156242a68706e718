"""``flashrec-harness make-checkpoint``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from checkpoint_samples import SMALL_SHOP
from typer.testing import CliRunner

from flashrec.errors import ConfigError
from flashrec_harness.checkpoints.build import CheckpointConfig
from flashrec_harness.checkpoints.cli import command, recipe, training_histories
from flashrec_harness.checkpoints.make_shop import write_shop_items
from flashrec_harness.checkpoints.sequences import History, hold_out, write_histories
from flashrec_harness.checkpoints.shop import Shop

APP = typer.Typer()
APP.command()(command)
SMALL = ["--steps", "3", "--batch-size", "8", "--hidden-size", "32", "--layers", "1", "--seed", "4"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    shop = Shop(SMALL_SHOP, seed=1)
    write_shop_items(shop, tmp_path / "items.tsv")
    write_histories(tmp_path / "train.csv", shop.sample(30, seed=1))
    write_histories(tmp_path / "test.csv", hold_out(shop.sample(10, seed=2)))
    return tmp_path


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(APP, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_checkpoint_from_files(data: Path) -> None:
    out = data / "out"
    printed = invoke(
        *("--catalog", str(data / "items.tsv"), "--sequences", str(data / "train.csv")),
        *("--held-out", str(data / "test.csv"), "--out", str(out), *SMALL),
    )
    assert "first-order Markov" in printed
    assert (out / "model.safetensors").exists()
    report = json.loads((out / "training.json").read_text())
    assert report["seed"] == 4
    assert report["settings"]["training"]["steps"] == 3
    assert report["settings"]["model"]["num_hidden_layers"] == 1


def test_test_rows_are_kept_out_of_the_training_data(data: Path) -> None:
    """The command trains on windows that hold the test transitions, once they are cut out."""
    write_histories(data / "leaky.csv", [History("u", ("P0001", "P0002", "P0003"))] * 2)
    write_histories(data / "rows.csv", [History("u", ("P0001",), "P0002")])
    out = data / "out"
    invoke(
        *("--catalog", str(data / "items.tsv"), "--sequences", str(data / "leaky.csv")),
        *("--held-out", str(data / "rows.csv"), "--out", str(out), *SMALL),
    )
    training = json.loads((out / "training.json").read_text())["training"]
    assert training["sequences"] == 1
    assert training["items"] == 2


def test_a_named_shape(tmp_path: Path) -> None:
    invoke("--shape", "tiny", "--out", str(tmp_path), "--catalog-sids", "20")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert len(json.loads((tmp_path / "catalog.json").read_text())) == 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "exactly one of"),
        (["--shop", "--shape", "tiny"], "exactly one of"),
        (["--shape", "huge"], "--shape huge: unknown"),
        (["--shape", "tiny", "--catalog-sids", "513"], r"--catalog-sids 513: codebooks of \(8, 8, 8\) have 512 SIDs"),
        (["--shop", "--catalog-sids", "5"], "--catalog-sids: only with --shape"),
    ],
)
def test_contradictions_are_errors(tmp_path: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CliRunner().invoke(APP, [*arguments, "--out", str(tmp_path / "out")], catch_exceptions=False)
    assert not (tmp_path / "out").exists()


def test_sequences_are_needed(data: Path) -> None:
    with pytest.raises(ConfigError, match="--sequences: needed"):
        CliRunner().invoke(APP, ["--catalog", str(data / "items.tsv"), "--out", str(data)], catch_exceptions=False)


def test_targets_are_trained_on_unless_refused(tmp_path: Path) -> None:
    file = tmp_path / "h.csv"
    write_histories(file, [History("u", ("a",), "b"), History("v", ("c", "d"))])
    assert training_histories(file, False) == [History("u", ("a", "b")), History("v", ("c", "d"))]
    assert training_histories(file, True) == [History("u", ("a",)), History("v", ("c", "d"))]


def test_the_recipe_names_what_is_not_a_default() -> None:
    usual = CheckpointConfig()
    assert recipe(["--shop"], usual, 0) == "flashrec-harness make-checkpoint --shop --out DIR"
    other = replace(usual, training=replace(usual.training, dropout=0.3))
    found = recipe(["--catalog", "my items.tsv"], other, 7)
    assert found == "flashrec-harness make-checkpoint --catalog 'my items.tsv' --dropout 0.3 --seed 7 --out DIR"
