"""A measured server is known by what it says of itself, and gets a baseline only if it says enough."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import pytest
from simulated_engine import SimulatedEngine

from flashrec_harness import environment
from flashrec_harness.environment import Commit
from flashrec_harness.outcome import Check, Outcome, SuiteContext
from flashrec_harness.perf import suite

INFO: dict[str, Any] = {
    "engine": {"device_name": "NVIDIA H200", "waves": 9},
    "engine_config": {"model_path": "/models/a", "kv_cache_dtype": "auto", "disable_cuda_graph": False, "new": None},
    "catalog": {"digest": "abc"},
    "server": {"http_processes": 0, "max_in_flight": 64, "in_flight": 3, "queue_depth": 1},
}


class Client:
    """Measures a simulated server; what it says of itself is ``info``."""

    def __init__(self, root: Path) -> None:
        self.root, self.engine, self.runs = root, SimulatedEngine(seed=5), 0
        self.info = copy.deepcopy(INFO)
        (root / "model").mkdir()
        (root / "model" / "config.json").write_text("{}")
        (root / "served.json").write_text(
            json.dumps({"name": "served", "processes": 2, "reference_requests": 0, "cells": [{"n": 2}]})
        )

    def run(self, update: suite.UpdateRequest | None = None) -> list[Check]:
        self.runs += 1
        self.engine.new_session()
        self.engine.configuration = copy.deepcopy(self.info)
        context = SuiteContext(
            model_path=self.root / "model",
            workload=str(self.root / "served.json"),
            out_dir=self.root / "reports" / f"run-{self.runs}" / "perf",
            url="http://server:8000",
        )
        settings = suite.PerfSettings(baselines=self.root / "baselines", reports=self.root / "reports", run=self.engine)
        return suite.run(context, settings, update)

    def hard(self) -> dict[str, Any]:
        self.run()
        path = self.root / "reports" / f"run-{self.runs}" / "perf" / "session.json"
        found: dict[str, Any] = json.loads(path.read_text())["environment"]["hard"]
        return found


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Client:
    monkeypatch.setattr(environment, "git_commit", lambda root=None: Commit("c0ffee" * 6, False))
    monkeypatch.setattr(environment, "processor_name", lambda: "a laptop")
    return Client(tmp_path)


def test_the_device_is_the_servers_and_the_client_is_named_beside_it(client: Client) -> None:
    hard = client.hard()
    assert (hard["device"], hard["client device"]) == ("NVIDIA H200", "a laptop")
    assert hard["server catalog"] == "abc"
    assert "cpu_cores" not in hard


@pytest.mark.parametrize(
    ("path", "value", "key"),
    [
        (("engine", "device_name"), "NVIDIA H100", "device"),
        (("engine_config", "model_path"), "/models/b", "server model_path"),
        (("engine_config", "kv_cache_dtype"), "fp8_e4m3", "server kv_cache_dtype"),
        (("engine_config", "disable_cuda_graph"), True, "server disable_cuda_graph"),
        (("catalog", "digest"), "abd", "server catalog"),
        (("server", "http_processes"), 2, "server http_processes"),
    ],
)
def test_two_servers_that_differ_have_different_hard_keys(
    client: Client, path: tuple[str, ...], value: object, key: str
) -> None:
    before = client.hard()
    place = client.info
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    assert set(environment.differing_keys(client.hard(), before)) == {key}


def test_what_a_server_is_doing_and_flags_at_their_defaults_are_no_keys(client: Client) -> None:
    before = client.hard()
    client.info["server"] |= {"in_flight": 9, "queue_depth": 7}
    del client.info["engine_config"]["new"]
    client.info["engine_config"]["record_ledger"] = False
    assert client.hard() == before


def test_a_baseline_of_a_server_is_compared_with_the_same_server_only(client: Client) -> None:
    for number in range(3):
        checks = client.run(suite.UpdateRequest("first") if number == 2 else None)
    assert (checks[-1].name, checks[-1].outcome) == ("baseline written", Outcome.PASS)
    assert list((client.root / "baselines").glob("*/*")) == [client.root / "baselines" / "nvidia-h200" / "served.json"]
    same = client.run()[-1]
    assert same.outcome is Outcome.PASS
    client.info["engine_config"]["kv_cache_dtype"] = "fp8_e4m3"
    other = client.run()[-1]
    assert other.outcome is Outcome.NOT_RUN
    assert "server kv_cache_dtype" in other.reason


@pytest.mark.parametrize("lacking", ["engine.device_name", "engine_config"])
def test_a_server_that_does_not_say_what_it_runs_gets_no_baseline(client: Client, lacking: str) -> None:
    *place, name = lacking.split(".")
    del functools.reduce(dict.__getitem__, place, client.info)[name]
    for number in range(3):
        check = client.run(suite.UpdateRequest("first") if number == 2 else None)[-1]
    assert (check.name, check.outcome) == ("baseline written", Outcome.FAIL)
    assert f"the server's /server_info lacks {lacking}" in check.reason
    assert not (client.root / "baselines").exists()
    assert client.hard()["server"] == "http://server:8000"
