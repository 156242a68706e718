"""``flashrec catalog``: statistics, checks and conversion between all formats."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sid_files import GROUPS, SPELLINGS, codebook_tokens, groups, make_layout, make_tokenizer, write
from typer.testing import CliRunner

from flashrec import catalog_cli
from flashrec.catalog_cli import app
from flashrec.errors import CatalogError, CheckpointError, FlashRecError, LayoutError
from flashrec.sid.catalog import load_catalog
from flashrec.sid.codes import Packing
from flashrec.sid.writers import CatalogFormat, format_of, write_catalog

TABLES = ("c.tsv", "c.csv", "c.parquet")
OUTPUTS = ("c.json", "c.index.json", "sid2pid.json", "sid2iid.json", *TABLES, "c.json.gz", "c.tsv.gz")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "source.tsv", SPELLINGS["tsv"])


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokens = ["<|sid_begin|>", *codebook_tokens((8, 8, 16)), "<|sid_end|>"]
    make_tokenizer(tokens).save_pretrained(folder)
    return folder


def run(*arguments: object) -> str:
    """Standard output of ``flashrec catalog ARGUMENTS``, which must succeed."""
    result = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def refusal(*arguments: object) -> FlashRecError:
    """The error that ``flashrec catalog ARGUMENTS`` ends in."""
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert isinstance(result.exception, FlashRecError)
    assert "\n" not in str(result.exception)
    return result.exception


def test_stats_as_json(source: Path) -> None:
    figures = json.loads(run("stats", source, "--json"))
    # {(0,1,2): 2 items, (0,3,0): 1, (7,0,9): 2}
    assert (figures["depth"], figures["num_sids"], figures["num_items"]) == (3, 3, 5)
    assert (figures["shared_sids"], figures["sharing_items"], figures["largest_group"]) == (2, 4, 2)
    assert (figures["repeated_items"], figures["duplicate_rows"]) == (0, 0)
    assert figures["has_titles"] is True
    assert figures["has_end_level"] is False
    levels = figures["levels"]
    assert [level["codebook_size"] for level in levels] == [8, 4, 10]
    assert [level["codes_used"] for level in levels] == [2, 3, 3]
    assert [level["nodes"] for level in levels] == [1, 2, 3]
    assert [level["max_children"] for level in levels] == [2, 2, 1]
    assert [level["mean_children"] for level in levels] == [2.0, 1.5, 1.0]
    assert [level["single_child_nodes"] for level in levels] == [0, 1, 3]


def test_stats_against_a_checkpoint(source: Path, model_path: Path) -> None:
    figures = json.loads(run("stats", source, "--model-path", model_path, "--json"))
    assert [level["codebook_size"] for level in figures["levels"]] == [8, 8, 16]
    text = run("stats", source, "--model-path", model_path, "--sid", "11:42/8,8,16")
    assert "3 semantic IDs of 3 levels, 5 items" in text
    assert "2 IDs name several items: 4 items, at most 2 under one ID" in text


def test_stats_count_items_under_several_sids_and_repeated_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "c.json", '{"0,0": [1, 1], "0,1": 1, "1,1": [2]}')
    figures = json.loads(run("stats", path, "--json"))
    assert (figures["repeated_items"], figures["duplicate_rows"], figures["num_items"]) == (1, 1, 3)


def test_check(source: Path, model_path: Path, tmp_path: Path) -> None:
    assert "3 semantic IDs of 3 levels, 5 items, 0 repeated rows; checked against no checkpoint" in run("check", source)
    assert "checked against codebooks of 8,8,16" in run("check", source, "--model-path", model_path)
    end_level = write(tmp_path / "end.json", SPELLINGS["commas with an end level"])
    assert "of 3 levels" in run("check", end_level, "--model-path", model_path)
    packed = write(tmp_path / "packed.json", '{"9": "x", "15": "y"}')
    assert "2 semantic IDs of 2 levels" in run("check", packed, "--packed", "--base", 4, "--depth", 2)


def test_errors_are_one_line_of_the_right_kind(source: Path, model_path: Path, tmp_path: Path) -> None:
    bad = write(tmp_path / "bad.json", '{"1,2,3": "x", "1,2,16": "y"}')
    error = refusal("check", bad, "--model-path", model_path)
    assert isinstance(error, CatalogError)
    assert str(error) == f"{bad}: row 2: level 2 has codes 0 to 15, not 16"
    error = refusal("check", source, "--model-path", model_path, "--sid", "10:41/8,8,16")
    assert isinstance(error, LayoutError)
    assert "--sid 10:41/8,8,16 contradicts the tokenizer, whose added tokens say 11:42/8,8,16" in str(error)
    assert isinstance(refusal("check", source, "--model-path", tmp_path / "gone"), CheckpointError)
    assert isinstance(refusal("check", source, "--model-path", tmp_path), CheckpointError)
    assert "--sid needs --model-path" in str(refusal("check", source, "--sid", "0:1/2"))
    assert "pass --to" in str(refusal("convert", source, tmp_path / "c.txt"))
    assert "cannot write" in str(refusal("convert", source, tmp_path / "gone" / "c.json"))


def test_a_file_that_is_there_is_replaced_on_request_only(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "kept.json"
    out.write_text("mine")
    assert "kept.json: exists already" in str(refusal("convert", source, out))
    assert out.read_text() == "mine"
    run("convert", source, out, "--overwrite")
    assert out.read_text() != "mine"


@pytest.mark.parametrize(
    ("written", "words"),
    [('{"0,0,0": ["another"]}', "read back, it differs"), ('{"0,0": ["short"]}', "2 codes per SID")],
)
def test_what_does_not_read_back_is_not_left_behind(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str, words: str
) -> None:
    """Or the next try would find it in its way."""
    out = tmp_path / "out.json"
    monkeypatch.setattr(catalog_cli, "write_catalog", lambda _, path, *__, **___: path.write_text(written))
    assert words in str(refusal("convert", source, out))
    assert not out.exists()


@pytest.mark.parametrize("with_model", [False, True])
@pytest.mark.parametrize("name", OUTPUTS)
def test_convert_to_every_format(source: Path, model_path: Path, tmp_path: Path, name: str, with_model: bool) -> None:
    out = tmp_path / "out"
    out.mkdir()
    options = ("--model-path", model_path) if with_model else ()
    report = run("convert", source, out / name, *options)
    assert "3 semantic IDs, 5 items" in report
    catalog = load_catalog(out / name, make_layout(8, 8, 16))
    assert groups(catalog) == GROUPS
    assert [entry.name for entry in out.iterdir()] == [name]
    if catalog.titles is None:
        assert "titles left out" in report
    else:
        assert catalog.titles[:] == [f"title of {item}" for item in catalog.items]


def test_converted_tokens_are_the_checkpoints(source: Path, model_path: Path, tmp_path: Path) -> None:
    run("convert", source, tmp_path / "a.index.json")
    assert json.loads((tmp_path / "a.index.json").read_text())["c"] == ["<a_0>", "<b_3>", "<c_0>"]
    run("convert", source, tmp_path / "b.json", "--to", "index", "--model-path", model_path)
    assert json.loads((tmp_path / "b.json").read_text())["c"] == ["<s_a_0>", "<s_b_3>", "<s_c_0>"]


def test_converted_code_columns_end_level_and_packed_integers(source: Path, tmp_path: Path) -> None:
    run("convert", source, tmp_path / "c.csv", "--code-columns")
    frame = pd.read_csv(tmp_path / "c.csv", dtype={"item_id": str})
    assert sorted(frame.columns) == ["code_0", "code_1", "code_2", "item_id", "title"]
    assert frame.set_index("item_id").loc["日本", ["code_0", "code_1", "code_2"]].tolist() == [7, 0, 9]
    run("convert", source, tmp_path / "c.json", "--end-level")
    assert list(json.loads((tmp_path / "c.json").read_text())) == ["0,1,2,1", "0,3,0,1", "7,0,9,1"]
    run("convert", source, tmp_path / "sid2iid.json", "--base", 16)
    packed = json.loads((tmp_path / "sid2iid.json").read_text())
    assert packed[str(7 * 256 + 9)] == [{"iid": 10}, {"iid": "日本"}]


def test_what_a_format_cannot_hold_is_refused(tmp_path: Path) -> None:
    twice = write(tmp_path / "twice.json", '{"0,0": "x", "0,1": "x"}')
    assert "item 'x' has two semantic IDs" in str(refusal("convert", twice, tmp_path / "c.index.json"))
    assert "do not fit 2 levels of 8192 codes" not in run("convert", twice, tmp_path / "sid2pid.json")
    wide = write(tmp_path / "wide.json", '{"0,9": "x"}')
    error = refusal("convert", wide, tmp_path / "c.json", "--to", "packed", "--base", 9)
    assert "2 levels with codes up to 9 do not fit 2 levels of 9 codes" in str(error)
    lines = write(tmp_path / "lines.json", '{"0,9": "x\\ny"}')
    assert "holds a line end: write CSV or Parquet" in str(refusal("convert", lines, tmp_path / "c.tsv"))
    assert "1 items" in run("convert", lines, tmp_path / "c.csv")


def test_format_of_a_file_name() -> None:
    assert format_of(Path("x.index.json.gz")) is CatalogFormat.INDEX
    assert format_of(Path("sid2pid.json")) is CatalogFormat.PACKED
    assert format_of(Path("catalog.json")) is CatalogFormat.JSON
    assert format_of(Path("a.b.parquet")) is CatalogFormat.PARQUET


TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6)


@st.composite
def titled_pairs(draw: st.DrawFn) -> list[tuple[tuple[int, ...], str, str]]:
    sid = st.tuples(*[st.integers(0, 7)] * draw(st.integers(1, 5)))
    return draw(st.lists(st.tuples(sid, TEXT, TEXT), min_size=1, max_size=12))


@given(
    pairs=titled_pairs(), kinds=st.lists(st.sampled_from(CatalogFormat), min_size=2, max_size=3), columns=st.booleans()
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=100)
def test_any_catalog_survives_a_chain_of_formats_or_is_refused(
    tmp_path: Path, pairs: list[tuple[tuple[int, ...], str, str]], kinds: list[CatalogFormat], columns: bool
) -> None:
    depth = len(pairs[0][0])
    frame = pd.DataFrame({"item_id": [item for _, item, _ in pairs], "title": [title for _, _, title in pairs]})
    for level in range(depth):
        frame[f"code_{level}"] = [sid[level] for sid, _, _ in pairs]
    frame.to_parquet(tmp_path / "source")
    first = catalog = load_catalog(tmp_path / "source", None)
    packing = Packing(base=8, depth=depth)
    for number, kind in enumerate(kinds):
        out = tmp_path / ("out.gz" if number % 2 else "out")
        packed = packing if kind is CatalogFormat.PACKED else None
        texts = [*catalog.items, *(catalog.titles or ())]
        two_sids = kind is CatalogFormat.INDEX and len(catalog.items) > len(set(catalog.items))
        if two_sids or (kind is CatalogFormat.TSV and any("\n" in text or "\r" in text for text in texts)):
            with pytest.raises(CatalogError):
                write_catalog(catalog, out, kind)
            return
        write_catalog(catalog, out, kind, packing=packed, code_columns=columns)
        catalog = load_catalog(out, None, packing=packed)
        assert catalog.digest == first.digest
        assert groups(catalog) == groups(first)
        if catalog.titles is not None:
            assert first.titles is not None
            assert catalog.titles[:] == first.titles[:]
