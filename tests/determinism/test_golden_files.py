"""Golden files that can decide nothing: without probes, or no golden file at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flashrec_harness import cli
from flashrec_harness.determinism import golden
from flashrec_harness.determinism.golden import GoldenError

EMPTY = {"schema": golden.SCHEMA, "commit": "a", "inputs": {"model": "x"}, "made_with": {}, "probes": {}}


def test_no_probes_are_no_evidence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "golden.json"
    path.write_text(json.dumps(EMPTY))
    with pytest.raises(SystemExit) as end:
        cli.main(["golden", "compare", str(path), str(path)])
    assert end.value.code == 4
    assert "have no probes" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b"{}", b'{"schema": 0}'])
def test_what_is_no_golden_file_is_the_user_s_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "golden.json"
    path.write_bytes(content)
    with pytest.raises(GoldenError, match=r"golden\.json: not golden digests"):
        golden.load(path)
