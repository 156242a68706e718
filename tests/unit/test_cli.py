"""The command line: each mistake of a user is one line on stderr and exit code 2 (SPEC V6)."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from sid_files import codebook_tokens, make_tokenizer
from tiny_checkpoint import edit_config, write_checkpoint

from flashrec import Engine, EngineConfig, __version__
from flashrec.assets import tiny_shop
from flashrec.cli import doctor, main

SHOP = tiny_shop()
FAST = ("--device", "cpu", "--no-invariance-check", "--max-context", "64", "--max-beam-width", "64", "--max-rows", "64")
ON_SHOP = ("generate", "--model-path", str(SHOP), "--sid-vocab-file", str(SHOP / "catalog.json"), *FAST)


class Finished(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


Cli = Callable[..., Finished]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs ``flashrec`` in this process."""

    def run(*arguments: str | Path) -> Finished:
        monkeypatch.setattr(sys, "argv", ["flashrec", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return Finished(int(ended.value.code or 0), captured.out, captured.err)

    return run


def assert_one_line(found: Finished, *parts: str) -> None:
    assert (found.code, found.out) == (2, "")
    assert found.err.startswith("flashrec: ")
    assert found.err.count("\n") == 1
    assert found.err.endswith("\n")
    for part in parts:
        assert part in found.err


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 96 tokens whose tokenizer has two codebooks of three codes."""
    path = write_checkpoint(tmp_path_factory.mktemp("checkpoint"), layers=1)
    make_tokenizer(codebook_tokens((3, 3))).save_pretrained(path)
    return path


@pytest.fixture
def copied(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "model"))


def with_catalog(model: Path, catalog: Path, text: str) -> list[str]:
    catalog.write_text(text)
    return ["generate", "--model-path", str(model), "--sid-vocab-file", str(catalog), "--input-ids", "1", *FAST]


@pytest.mark.parametrize("command", ["generate", "serve"])
def test_no_such_model_directory(cli: Cli, command: str, tmp_path: Path) -> None:
    assert_one_line(cli(command, "--model-path", tmp_path / "none", *prompt_of(command)), "config.json: no such file")


def prompt_of(command: str) -> list[str]:
    return ["--input-ids", "1"] if command == "generate" else []


@pytest.mark.parametrize("command", ["generate", "serve"])
def test_unknown_architecture(cli: Cli, command: str, copied: Path) -> None:
    edit_config(copied, lambda config: config.update(architectures=["OtherModel"]))
    found = cli(command, "--model-path", copied, *prompt_of(command))
    assert_one_line(found, "architectures = ['OtherModel'] is not supported", "Qwen3ForCausalLM")


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.json", "{", "not JSON"),
        ("config.json", "[]", "expected a JSON object, got list"),
        ("config.json", '{"architectures": ["Qwen3ForCausalLM"], "hidden_size": "big"}', "hidden_size = 'big'"),
        ("generation_config.json", "{", "not JSON"),
        ("generation_config.json", '{"eos_token_id": "end"}', "eos_token_id = 'end'"),
        ("model.safetensors.index.json", "{}", "no weight_map"),
        ("tokenizer.json", "{}", "the tokenizer cannot be read"),
    ],
)
def test_broken_checkpoint_files(cli: Cli, copied: Path, file: str, text: str, message: str) -> None:
    (copied / file).write_text(text)
    assert_one_line(cli("generate", "--model-path", copied, "--input-ids", "1", *FAST), message)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"eos_token_id": {}}, "eos_token_id"),
        ({"quantization_config": "fp8"}, "quantization_config = 'fp8': expected an object"),
        ({"num_key_value_heads": 3}, "num_attention_heads = 4 is no multiple of num_key_value_heads = 3"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0: expected a positive integer"),
    ],
)
def test_broken_config_fields(cli: Cli, copied: Path, fields: dict[str, object], message: str) -> None:
    edit_config(copied, lambda config: config.update(fields))
    (copied / "generation_config.json").unlink()
    found = cli("generate", "--model-path", copied, "--input-ids", "1", *FAST)
    assert found.code == 2
    assert message in found.err


def test_bad_catalogs(cli: Cli, checkpoint: Path, tmp_path: Path) -> None:
    catalog = tmp_path / "catalog.json"
    good = '"0,0": "pen", "1,2": "cup"'
    for text, *parts in (
        ("{" + good + ', "0,3": "hat"}', "row 3", "level 1 has codes 0 to 2, not 3"),
        ("{" + good + ', "0,x": "hat"}', "row 3"),
        ("{}", "catalog.json"),
        ("", "the catalog is empty"),
    ):
        assert_one_line(cli(*with_catalog(checkpoint, catalog, text)), str(catalog), *parts)
    catalog.unlink()
    assert_one_line(cli("catalog", "stats", catalog), "No such file")
    assert_one_line(cli("catalog", "check", SHOP / "catalog.json", "--model-path", checkpoint), "catalog: 3 levels")


def test_tokenizer_without_codebooks(cli: Cli, copied: Path, tmp_path: Path) -> None:
    make_tokenizer([]).save_pretrained(copied)
    found = cli(*with_catalog(copied, tmp_path / "catalog.json", '{"0,0": "pen"}'))
    assert_one_line(found, "no codebook among its added tokens", "--sid")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copied / name).unlink(missing_ok=True)
    found = cli(*with_catalog(copied, tmp_path / "catalog.json", '{"0,0": "pen"}'))
    assert_one_line(found, "a catalog needs the tokenizer")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--input-ids", "1", "-n", "0"), "n: must be at least 1, got 0"),
        (("--input-ids", "1", "-n", "65"), "n: 65 is above this engine's max_beam_width of 64"),
        (("--input-ids", "1", "-n", "5", "--beam-width", "4"), "n: 5 results cannot come from a beam_width of 4"),
        (("--input-ids", "1,704"), "input_ids: token id 704 at position 1 is outside 0 .. 703"),
        (("--input-ids=-1",), "input_ids: token id -1 at position 0"),
        (("--input-ids", "1,99999999999999999999"), "input_ids: token ids must be 64-bit integers"),
        (("--input-ids", "1,two"), "input_ids: expected comma-separated integers, got '1,two'"),
        (("--input-ids", ",".join(["7"] * 64)), "input_ids: 65 tokens are above this engine's max_context of 64"),
        (("--prompt", ""), "input_ids: the prompt is empty"),
        ((), "prompt: give at least one"),
        (("--prompts-file", "no-such-file"), "prompts_file: no-such-file"),
        (("--input-ids", "1", "--temperature", "nan"), "temperature: must be a finite number"),
        (("--input-ids", "1", "--length-penalty", "1e6"), "length_penalty: must be a finite number in -16 .. 16"),
        (("--input-ids", "1", "--max-tokens", "2"), "max_tokens: 2 is less than a semantic ID"),
        (("--input-ids", "1", "--max-rows", "8"), "max_rows 8 is below max_beam_width 64"),
        (("--input-ids", "1", "--page-size", "0"), "page_size"),
        (("--input-ids", "1", "--device", "gpu"), "device 'gpu' is none of auto, cpu, cuda and cuda:N"),
        (("--input-ids", "1", "--device", "cuda:99"), "device: cuda:99 is not here"),
        (("--input-ids", "1", "--attention-backend", "flashinfer"), "flashinfer needs a CUDA device"),
    ],
)
def test_bad_requests_and_settings(cli: Cli, arguments: tuple[str, ...], message: str) -> None:
    assert_one_line(cli(*ON_SHOP, *arguments), message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--user", "100000"), "user: 100000 is outside"),
        (("-n", "0"), "n: must be"),
    ],
)
def test_bad_demo(cli: Cli, arguments: tuple[str, ...], message: str) -> None:
    assert_one_line(cli("demo", *arguments), message)


@pytest.mark.parametrize(
    "arguments", [("generate",), ("no-such-command",), (*ON_SHOP, "--no-such-flag"), (*ON_SHOP, "-n", "two")]
)
def test_misspelt_commands(cli: Cli, arguments: tuple[str, ...]) -> None:
    found = cli(*arguments)
    assert (found.code, found.out) == (2, "")
    assert "Error" in found.err
    assert "Traceback" not in found.err


def test_generate_prints_what_the_engine_returns(cli: Cli) -> None:
    config = EngineConfig(
        model_path=SHOP, sid_vocab_file=SHOP / "catalog.json", device="cpu", invariance_check=False, max_context=64
    )
    engine = Engine(config)
    wanted = engine.generate([(5, 6, 7), (8,)], n=3)
    found = cli(*ON_SHOP, "--json", "-n", "3", "--input-ids", "5,6,7", "--input-ids", "8")
    assert found.code == 0
    lines = [json.loads(line) for line in found.out.splitlines()]
    assert [line["prompt"] for line in lines] == ["0", "1"]
    for line, result in zip(lines, wanted, strict=True):
        assert [beam["score"] for beam in line["beams"]] == [beam.score for beam in result.beams]
        assert [tuple(beam["token_ids"]) for beam in line["beams"]] == [beam.token_ids for beam in result.beams]
        assert [beam["text"] for beam in line["beams"]] == [engine.tokenizer.decode(b.token_ids) for b in result.beams]
        assert [tuple(beam["items"]) for beam in line["beams"]] == [beam.items for beam in result.beams]


def test_generate_as_a_table_and_from_a_file(cli: Cli, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("first prompt\n\nsecond prompt\n")
    found = cli(*ON_SHOP, "-n", "2", "--prompts-file", prompts)
    assert found.code == 0
    assert "prompt 0:" in found.out
    assert "prompt 1:" in found.out
    assert "prompt 2:" not in found.out


def test_brackets_in_items_are_no_markup(cli: Cli, tmp_path: Path) -> None:
    head, *rows = (SHOP / "items.tsv").read_text().splitlines()
    named = [f"[{place}]{row}" for place, row in zip(itertools.cycle(("/x", "red")), rows, strict=False)]
    (tmp_path / "items.tsv").write_text("\n".join([head, *named]))
    found = cli(
        "generate", "--model-path", SHOP, "--sid-vocab-file", tmp_path / "items.tsv", *FAST, "-n", "9", "--prompt", "x"
    )
    assert found.code == 0
    assert "[/x]P" in found.out
    assert "[red]P" in found.out


def test_demo_recommends_and_shows_titles(cli: Cli) -> None:
    found = cli("demo", "--user", "3", "-n", "5")
    assert found.code == 0
    assert "bought, oldest first" in found.out
    assert "best of 5" in found.out
    assert re.search(r"bought next: \S.* \((number [1-5]|not among them)\)", found.out)
    target = found.out.split("bought next: ")[1].rpartition(" (")[0]
    assert (target in found.out.split("bought next: ")[0].split("best of 5")[1]) is ("not among" not in found.out)


def test_doctor_says_what_runs_and_why(cli: Cli) -> None:
    found = cli("doctor")
    assert found.code == 0
    for word in ("torch", "gpu", "kernel rms_norm", "triton mode"):
        assert word in found.out


def test_doctor_says_how_to_get_what_is_missing_and_of_that_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "fastapi":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    found = {one.subject: one for one in doctor.findings()}
    assert found["fastapi"][1:] == ("not installed", "needed for flashrec serve; pip install 'flashrec[serve]'")
    assert [name for name, one in found.items() if "pip install" in one.consequence] == ["fastapi"]
    assert set(doctor.EXTRAS) < set(doctor.PACKAGES)


def test_version(cli: Cli) -> None:
    assert cli("--version") == (0, f"flashrec {__version__}\n", "")


def test_a_process_of_its_own_ends_the_same_way(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flashrec", "generate", "--model-path", str(tmp_path), "--input-ids", "1"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert_one_line(Finished(found.returncode, found.stdout, found.stderr), str(tmp_path / "config.json"))
