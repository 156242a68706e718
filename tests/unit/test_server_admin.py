"""Health, information, metrics, cache, profiler, keys, and the errors of the transport."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_support import Running, error_of, make_scheduler, running, wait_until

from flashrec.errors import ConfigError, RequestError
from flashrec.server.auth import authorized
from flashrec.server.config import ServerConfig
from flashrec.server.paths import resolve_inside


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Running]:
    config = ServerConfig(port=0, profiler_dir=tmp_path / "profiles", max_body_bytes=1000)
    with running(make_scheduler(tmp_path), config) as server:
        yield server


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """For requests that change nothing."""
    directory = tmp_path_factory.mktemp("shop")
    config = ServerConfig(port=0, profiler_dir=directory / "profiles", max_body_bytes=1000)
    with running(make_scheduler(directory), config) as server:
        yield server


def test_health_and_health_generate(shop: Running) -> None:
    assert shop.client.get("/health").status_code == 200
    assert shop.scheduler.submitted == []
    assert shop.client.get("/health_generate").status_code == 200
    assert len(shop.scheduler.submitted) == 1


def test_models_and_server_info(shop: Running) -> None:
    (model,) = shop.client.get("/v1/models").json()["data"]
    assert (model["id"], model["object"]) == ("shop-model", "model")
    info = shop.client.get("/server_info").json()
    catalog = shop.scheduler.engine.catalog
    assert info["catalog"]["digest"] == catalog.digest
    assert (info["catalog"]["num_sids"], info["catalog"]["num_items"]) == (4, 5)
    assert info["layout"] == {"depth": 2, "sizes": [3, 3], "begin": 262, "end": 263}
    assert info["engine"]["waves"] == 3
    assert info["engine"]["buckets"] == {"16": 4}
    assert info["engine_config"]["score_space"] == "sid"
    assert info["profiler"]["state"] == "idle"
    assert shop.client.get("/model_info").json()["model_path"].endswith("shop-model")


def samples(text: str) -> dict[tuple[str, str], float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[sample.name, labels] = sample.value
    return found


def test_metrics_count_what_happened(shop: Running) -> None:
    shop.post("/generate", {"text": "hello", "sampling_params": {"n": 2}})
    shop.post("/generate", {"text": "x", "sampling_params": {"n": 0}})
    shop.client.get("/no/such/path")
    found = samples(shop.client.get("/metrics").text)
    assert found["flashrec_http_requests_total", "endpoint=/generate,status=200"] == 1
    assert found["flashrec_http_requests_total", "endpoint=/generate,status=400"] == 1
    assert found["flashrec_http_requests_total", "endpoint=other,status=404"] == 1
    assert found["flashrec_errors_total", "kind=invalid_value"] == 1
    assert found["flashrec_prompt_tokens_total", ""] == 5
    assert found["flashrec_cached_tokens_total", ""] == 16
    assert found["flashrec_beams_total", ""] == 2
    assert found["flashrec_phase_seconds_count", "phase=search"] == 1
    assert found["flashrec_phase_seconds_count", "phase=tokenize"] == 2
    assert found["flashrec_engine_waves", ""] == 3
    assert found["flashrec_engine_pages", "name=free"] == 5
    assert found["flashrec_engine_buckets", "name=16"] == 4
    assert found["flashrec_engine_kernels_info", "rms_norm=torch"] == 1
    assert found["flashrec_engine_queue_depth", ""] == 0


def test_two_applications_have_registries_of_their_own(tmp_path: Path, shop: Running) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with running(make_scheduler(other), ServerConfig(port=0)) as second:
        second.post("/generate", {"text": "x"})
        assert samples(shop.client.get("/metrics").text)["flashrec_beams_total", ""] == 0


def test_flush_cache(shop: Running) -> None:
    response = shop.client.post("/flush_cache")
    assert (response.status_code, response.text) == (200, "Cache flushed, 7 pages freed.\n")
    assert shop.client.post("/flush_cache?timeout=60.0").status_code == 200
    assert shop.scheduler.flushes == 2


def test_profile_from_start_to_file(shop: Running, tmp_path: Path) -> None:
    """What ``sglang.bench_serving`` sends, its counts as strings; stopping again after the end is no error."""
    body = {
        "activities": ["CPU", "GPU"],
        "num_steps": "2",
        "profile_by_stage": None,
        "profile_stages": None,
        "output_dir": str(tmp_path / "profiles" / "17.5"),
        "profile_prefix": "run",
    }
    assert shop.post("/start_profile", body).status_code == 200
    assert error_of(shop.post("/start_profile", {}))["code"] == "profiler_state"
    profiler = shop.scheduler.engine.profiler
    assert shop.client.get("/server_info").json()["profiler"]["state"] == "recording"
    shop.post("/generate", {"text": "x"})  # tokenised and answered while the profiler records
    for stage in ("prefill", "decode"):
        profiler.on_forward(stage)
    profiler.on_wave_end()
    wait_until(lambda: shop.client.get("/server_info").json()["profiler"]["state"] == "idle", 60)
    stopped = shop.post("/stop_profile", {})
    assert stopped.status_code == 200
    (name,) = stopped.json()["files"]
    assert name == str(tmp_path / "profiles" / "17.5" / "run-TP-0.trace.json.gz")
    trace = json.loads(gzip.decompress(Path(name).read_bytes()))
    spans = {event.get("name") for event in trace["traceEvents"]}
    assert {"flashrec.tokenize", "flashrec.respond"} <= spans


def test_stopping_what_never_started_is_a_409(refusing: Running) -> None:
    assert refusing.client.post("/stop_profile").status_code == 409


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"output_dir": "/etc"}, "output_dir"),
        ({"output_dir": "../elsewhere"}, "output_dir"),
        ({"output_dir": "a\0b"}, "output_dir"),
        ({"profile_prefix": "../../x"}, "profile_prefix"),
        ({"profile_id": "a/b"}, "profile_id"),
        ({"num_steps": 0}, "num_steps"),
        ({"num_steps": "many"}, "num_steps"),
        ({"activities": ["RPD"]}, "activities[0]"),
        ({"merge_profiles": True}, "merge_profiles"),
        ({"profile_stages": ["prefill"]}, "profile_stages"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_bad_profile_fields(refusing: Running, body: dict[str, object], field: str) -> None:
    response = refusing.post("/start_profile", body)
    assert response.status_code == 400, response.text
    assert error_of(response)["param"] == field
    assert refusing.scheduler.engine.profiler.state == "idle"


def test_output_dir_is_resolved_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "profiles"
    root.mkdir()
    monkeypatch.chdir(tmp_path)

    def resolved(wanted: str | None) -> Path:
        return resolve_inside(Path("profiles"), wanted, field="output_dir", setting="A_SETTING")

    assert resolved(None) == root
    assert resolved("./profiles/run1") == root / "run1"
    assert resolved("run1") == root / "run1"
    assert resolved(str(root / "a" / ".." / "b")) == root / "b"
    (root / "link").symlink_to("/etc")
    for outside in ("..", "link", "link/x", "/", str(tmp_path), f"{root}-not"):
        with pytest.raises(RequestError, match=r"output_dir: must lie inside .*, which A_SETTING sets"):
            resolved(outside)


def test_transport_errors(refusing: Running) -> None:
    assert refusing.client.get("/generate").status_code == 405
    assert error_of(refusing.client.get("/nothing"))["code"] == "http_error"
    assert refusing.raw("/generate", b'{"text": "x"}', "text/plain").status_code == 415
    large = refusing.raw("/generate", b'{"text": "' + b"x" * 1000 + b'"}')
    assert (large.status_code, error_of(large)["code"]) == (413, "body_too_large")

    def chunks() -> Iterator[bytes]:
        yield from [b"x" * 600, b"x" * 600]

    chunked = refusing.client.post("/generate", content=chunks(), headers={"content-type": "application/json"})
    assert chunked.status_code == 413


def test_request_ids(refusing: Running) -> None:
    given = refusing.client.get("/health", headers={"x-request-id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1"
    made = refusing.client.get("/health", headers={"x-request-id": "a b\tc"}).headers["x-request-id"]
    assert re.fullmatch("[0-9a-f]{32}", made)


def test_the_openapi_document_describes_the_bodies(refusing: Running) -> None:
    document = refusing.client.get("/openapi.json").json()
    schema = document["paths"]["/generate"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema == {"$ref": "#/components/schemas/GenerateRequest"}
    assert "beam_width" in document["components"]["schemas"]["SamplingParams"]["properties"]
    text = json.dumps(document)
    for name in re.findall(r'"#/components/schemas/([^"]+)"', text):
        assert name in document["components"]["schemas"]


def test_the_api_key(tmp_path: Path) -> None:
    with running(make_scheduler(tmp_path), ServerConfig(port=0, api_key="secret")) as server:
        assert server.client.get("/health").status_code == 200
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            response = server.post("/generate", {"text": "x"}, headers=headers)
            assert (response.status_code, error_of(response)["type"]) == (401, "authentication_error")
        assert server.client.get("/server_info").status_code == 401
        good = {"authorization": "Bearer secret"}
        assert server.post("/generate", {"text": "x"}, headers=good).status_code == 200
        assert "secret" not in server.client.get("/server_info", headers=good).text
    assert server.scheduler.submitted[0].input_ids
    assert len(server.scheduler.submitted) == 1


def test_key_comparison() -> None:
    assert authorized(None, None)
    assert authorized("bearer k", "k")
    assert not authorized("Bearer \xff", "k")
    assert not authorized("Bearer kk", "k")
    assert not authorized("", "k")


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"port": 70000}, "port"),
        ({"request_timeout_s": 0.0}, "request_timeout_s"),
        ({"workers": 0}, "workers"),
        ({"request_timeout_s": float("nan")}, "request_timeout_s"),
        ({"api_key": " k"}, "api_key"),
        ({"prompt_template": Path("/no/such/file")}, "prompt_template"),
    ],
)
def test_bad_settings_name_the_field(changes: dict[str, object], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        ServerConfig(**changes)  # type: ignore[arg-type]


def test_settings_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORT", "1234")
    monkeypatch.setenv("FLASHREC_TORCH_PROFILER_DIR", "/x/y")
    monkeypatch.setenv("FLASHREC_API_KEY", "k")
    config = ServerConfig()
    assert (config.port, config.profiler_dir, config.api_key, config.host) == (1234, Path("/x/y"), "k", "127.0.0.1")
    assert "api_key" not in repr(config)
    monkeypatch.setenv("PORT", "http")
    with pytest.raises(ConfigError, match="PORT"):
        ServerConfig()
