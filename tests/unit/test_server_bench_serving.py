"""``sglang.bench_serving`` itself, from SGLang's own environment, against a server of ours (SPEC T1)."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
from pathlib import Path

import orjson
import pytest

import flashrec_harness.sglang
from flashrec_harness.servers import flashrec_server
from flashrec_harness.sglang_env import SglangUnavailableError, sglang_python

SHOP = Path("engine/flashrec/assets/tiny-shop").resolve()
SHIMS = Path(flashrec_harness.sglang.__file__).parent
CLIENT = "import cpu_shims, runpy; runpy.run_module('sglang.bench_serving', run_name='__main__', alter_sys=True)"
NO_DATASETS = "def load_dataset(*_, **__):\n    raise RuntimeError('it was told to use random ids')\n"


@pytest.mark.slow
@pytest.mark.parametrize(("catalog", "tokens"), [(False, 6), (True, 4)])
def test_the_benchmark_runs_and_its_profile_is_written(tmp_path: Path, catalog: bool, tokens: int) -> None:
    """20 prompts of random ids, streamed as it does by default; every answer is counted in full."""
    try:
        python = sglang_python()
    except SglangUnavailableError as error:
        pytest.skip(str(error))
    (tmp_path / "stub").mkdir()
    (tmp_path / "stub" / "datasets.py").write_text(NO_DATASETS)  # it imports more than random ids need
    profiles = tmp_path / "profiles"
    with flashrec_server(
        SHOP,
        sid_vocab_file=SHOP / "items.tsv" if catalog else None,
        arguments=("--kv-pool-tokens", "16384", "--no-invariance-check"),
        env={"FLASHREC_TORCH_PROFILER_DIR": str(profiles)},
        log_dir=tmp_path,
    ) as server:
        command = [str(python), "-c", CLIENT, "--backend", "sglang", "--base-url", server.url, "--num-prompts", "20"]
        command += ["--dataset-name", "random-ids", "--random-input-len", "60", "--random-output-len", str(tokens)]
        command += ["--random-range-ratio", "1.0", "--tokenizer", str(SHOP), "--output-file", str(tmp_path / "found")]
        command += ["--profile", "--profile-output-dir", str(profiles / "bench"), "--disable-tqdm"]
        paths = os.pathsep.join((str(SHIMS), str(tmp_path / "stub")))
        environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, cwd=tmp_path)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads((tmp_path / "found").read_text())
    assert found["completed"] == 20
    assert found["total_output_tokens"] == 20 * tokens
    (trace,) = (profiles / "bench").rglob("*.trace.json.gz")
    names = {event.get("name") for event in orjson.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert {"flashrec.prefill", "flashrec.decode"} <= names
