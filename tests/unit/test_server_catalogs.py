"""``/catalog`` over a socket: what it loads and refuses, what it tells, and whole answers while it changes."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_support import FakeScheduler, Running, error_of, make_scheduler, running, wait_until
from tiny_engine import open_engine, prompt, write_catalog, write_shop

from flashrec.errors import ConfigError
from flashrec.runtime.scheduler import Scheduler
from flashrec.server.config import ServerConfig

PATIENCE_S = 30.0
ROWS = {"spring.tsv": [("lily", 2, 2)], "autumn.tsv": [("oak", 0, 1), ("elm", 1, 0), ("42", 1, 2)]}


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Running]:
    directory = tmp_path / "catalogs"
    directory.mkdir()
    for name, rows in ROWS.items():
        text = "".join(f"{item}\t<s_a_{a}><s_b_{b}>\tThe {item}\n" for item, a, b in rows)
        (directory / name).write_text(f"item_id\tsid\ttitle\n{text}")
    with running(make_scheduler(tmp_path), ServerConfig(port=0, catalog_dir=directory)) as server:
        yield server


def listed(server: Running) -> dict[str, tuple[str, str | None]]:
    """Labels of the revisions that each name stands for."""
    places = server.client.get("/catalog").json()["catalogs"]
    return {
        place["name"]: (place["active"]["catalog"], place["standby"] and place["standby"]["catalog"])
        for place in places
    }


def samples(server: Running, metric: str) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(server.client.get("/metrics").text):
        for sample in family.samples:
            if sample.name == metric:
                found[",".join(sample.labels[key] for key in sorted(sample.labels) if key != "digest")] = sample.value
    return found


def items(server: Running, **fields: object) -> list[str]:
    answer = server.post("/generate", {"text": "x", "sampling_params": {"n": 9} | fields}).json()
    return [item for beam in answer["meta_info"]["beam_results"] for item in beam["meta_info"]["items"]]


def test_load_rollback_and_drop(shop: Running) -> None:
    before = items(shop)
    answer = shop.post("/catalog", {"file": "spring.tsv"}).json()
    assert (answer["name"], answer["active"]["catalog"], answer["standby"]["catalog"]) == (
        "default",
        "default@2",
        "default@1",
    )
    served = shop.scheduler.engine.catalog
    assert (answer["active"]["digest"], answer["active"]["num_sids"], answer["active"]["num_items"]) == (
        served.digest,
        1,
        1,
    )
    assert items(shop) == ["lily"]
    assert shop.post("/catalog", {"name": "fall", "file": "autumn.tsv"}).status_code == 200
    assert listed(shop) == {"default": ("default@2", "default@1"), "fall": ("fall@3", None)}
    assert items(shop, catalog="fall") == ["oak", "elm", "42"]
    assert items(shop, catalog="default@1") == before
    back = shop.post("/catalog/rollback", {}).json()
    assert (back["active"]["catalog"], back["standby"]["catalog"]) == ("default@1", "default@2")
    assert items(shop) == before
    assert shop.client.delete("/catalog/fall").json() == shop.client.get("/catalog").json()
    assert listed(shop) == {"default": ("default@1", "default@2")}


def test_a_catalog_may_stand_by(shop: Running) -> None:
    before = items(shop)
    answer = shop.post("/catalog", {"file": "autumn.tsv", "activate": False}).json()
    assert (answer["active"]["catalog"], answer["standby"]["catalog"]) == ("default@1", "default@2")
    assert items(shop) == before
    assert items(shop, catalog="default@2") == ["oak", "elm", "42"]
    shop.post("/catalog/rollback", {"name": "default"})
    assert items(shop) == ["oak", "elm", "42"]


def test_every_search_takes_a_catalog_and_says_which_answered(shop: Running) -> None:
    shop.post("/catalog", {"name": "fall", "file": "autumn.tsv"})
    messages = [{"role": "user", "content": "x"}]
    for name, label, first in (("fall", "fall@2", "oak"), ("fall@2", "fall@2", "oak"), (None, "default@1", "apple")):
        meta = shop.post("/generate", {"text": "x", "sampling_params": {"catalog": name}}).json()["meta_info"]
        assert (meta["catalog"], meta["items"][0]) == (label, first)
        chat = shop.post("/v1/chat/completions", {"messages": messages, "catalog": name}).json()["choices"][0]
        text = shop.post("/v1/completions", {"prompt": "x", "catalog": name}).json()["choices"][0]
        for choice in (chat, text):
            assert (choice["sglext"]["catalog"], choice["sglext"]["items"][0]) == (label, first)
        asked = {"history": [[0, 1] if name else [0, 0]], "k": 2, "catalog": name}
        found = shop.post("/v1/recommend", asked).json()
        assert (found["catalog"], found["items"][0]["item_id"]) == (label, first)
        assert found["items"][0]["title"] == ("The oak" if name else "Title of apple")
    known = shop.post("/v1/recommend", {"history": ["elm"], "catalog": "fall"})
    assert known.status_code == 200
    foreign = shop.post("/v1/recommend", {"history": ["elm"]})
    assert error_of(foreign)["message"] == "history[0]: no item 'elm' in the catalog"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/generate", {"text": "x", "sampling_params": {"catalog": "winter"}}, "sampling_params.catalog"),
        ("/generate", {"text": "x", "sampling_params": {"catalog": "default@9"}}, "sampling_params.catalog"),
        ("/v1/completions", {"prompt": "x", "catalog": "winter"}, "catalog"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "catalog": "winter"}, "catalog"),
        ("/v1/recommend", {"history": ["apple"], "catalog": "winter"}, "catalog"),
    ],
)
def test_an_unknown_catalog_is_named_with_the_known_ones(
    shop: Running, path: str, body: dict[str, object], field: str
) -> None:
    response = shop.post(path, body)
    assert response.status_code == 400
    assert error_of(response)["param"] == field
    assert error_of(response)["message"].endswith("is not served here; served are 'default'")
    assert shop.scheduler.submitted == []


def test_what_is_refused_changes_nothing(shop: Running) -> None:
    directory = shop.context.config.catalog_dir
    assert directory is not None
    (directory / "depth.json").write_text('{"1,2,0": "x", "1,2,2": "y"}')
    (directory / "code.json").write_text('{"1,2": "x", "1,3": "y"}')
    (directory / "out.json").symlink_to(directory.parent / "items.tsv")
    (directory / "folder").mkdir()
    os.mkfifo(directory / "pipe")
    before = shop.client.get("/catalog").json()
    wrong: list[tuple[dict[str, object], str, str]] = [
        ({"file": "depth.json"}, "file", "row 2: 3 codes per SID, but the layout has 2 levels"),
        ({"file": "code.json"}, "file", "row 2: level 1 has codes 0 to 2, not 3"),
        ({"file": "missing.json"}, "file", "no such file"),
        ({"file": "folder"}, "file", "no such file"),
        ({"file": "pipe"}, "file", "no such file"),
        ({"file": ""}, "file", "at least 1 character"),
        ({}, "file", "Field required"),
        ({"file": "../items.tsv"}, "file", "must lie inside"),
        ({"file": str(directory.parent / "items.tsv")}, "file", "must lie inside"),
        ({"file": "out.json"}, "file", "must lie inside"),
        ({"file": "spring.tsv", "name": "a@1"}, "name", "must be letters"),
        ({"file": "spring.tsv", "name": "a/b"}, "name", "must be letters"),
        ({"file": "spring.tsv", "name": "new", "activate": False}, "activate", "is a new name"),
        ({"file": "spring.tsv", "surprise": 1}, "surprise", "unknown field"),
        ({"file": "spring.tsv", "activate": 1}, "activate", "valid boolean"),
    ]
    for body, field, message in wrong:
        response = shop.post("/catalog", body)
        assert response.status_code == 400, body
        assert error_of(response)["param"] == field, body
        assert message in error_of(response)["message"], error_of(response)
    assert error_of(shop.post("/catalog", {"file": "depth.json"}))["code"] == "invalid_catalog"
    nothing = shop.post("/catalog/rollback", {})
    assert (nothing.status_code, error_of(nothing)["code"]) == (409, "catalog_state")
    assert error_of(shop.post("/catalog/rollback", {"name": "winter"}))["param"] == "name"
    for name in ("default", "winter", "a%2Fb"):
        assert shop.client.delete(f"/catalog/{name}").status_code in (400, 404)
    assert shop.client.get("/catalog").json() == before
    assert items(shop) == ["apple", "pear", "plum", "kiwi", "42"]


def test_metrics_and_server_info_tell_of_catalogs(shop: Running) -> None:
    shop.post("/catalog", {"file": "spring.tsv"})
    shop.post("/catalog", {"name": "fall", "file": "autumn.tsv"})
    shop.post("/catalog", {"file": "missing.tsv"})
    shop.post("/catalog/rollback", {"name": "fall"})
    shop.client.delete("/catalog/winter")
    assert samples(shop, "flashrec_catalog_changes_total") == {
        "load,ok": 2,
        "load,refused": 1,
        "rollback,refused": 1,
        "drop,refused": 1,
    }
    assert samples(shop, "flashrec_catalog_info") == {
        "default,2,active": 1,
        "default,1,standby": 1,
        "fall,3,active": 1,
    }
    assert shop.client.get("/server_info").json()["catalogs"] == shop.client.get("/catalog").json()["catalogs"]


def test_catalogs_are_for_those_who_hold_the_key_and_where_a_directory_is_set(tmp_path: Path) -> None:
    with running(make_scheduler(tmp_path), ServerConfig(port=0, api_key="secret", catalog_dir=tmp_path)) as server:
        assert server.client.get("/catalog").status_code == 401
        assert server.post("/catalog", {"file": "items.tsv"}).status_code == 401
        assert server.post("/catalog/rollback", {}).status_code == 401
        assert server.client.delete("/catalog/x").status_code == 401
    with running(make_scheduler(tmp_path), ServerConfig(port=0)) as server:
        assert error_of(server.post("/catalog", {"file": "items.tsv"}))["message"].endswith("--catalog-dir")
    with pytest.raises(ConfigError, match="catalog_dir: no such directory"):
        ServerConfig(port=0, catalog_dir=tmp_path / "none")


def test_one_answer_holds_one_revision(shop: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reload comes while a request is read: it is answered from what stood there when it came in."""
    scheduler: FakeScheduler = shop.scheduler
    submit_all = scheduler.submit_all

    def reload_then_submit(*arguments: Any) -> Any:
        shop.scheduler.load_catalog("default", Path(shop.context.config.catalog_dir or "") / "spring.tsv")
        return submit_all(*arguments)

    monkeypatch.setattr(scheduler, "submit_all", reload_then_submit)
    answers = shop.post("/generate", {"text": ["x", "y", "z"], "sampling_params": {"n": 1}}).json()
    assert [answer["meta_info"]["catalog"] for answer in answers] == ["default@1"] * 3
    scheduler.submitted.clear()
    choices = shop.post("/v1/completions", {"prompt": ["x", "y"]}).json()["choices"]
    assert [choice["sglext"]["catalog"] for choice in choices] == ["default@2"] * 2
    assert listed(shop)["default"][0] == "default@3"


def test_a_revision_lives_until_its_answer_is_written(shop: Running) -> None:
    """Two reloads while the request waits: its revision is in no place any more, and still answers it."""
    shop.scheduler.hold = True
    found: list[Any] = []
    asked = {"history": ["apple"], "k": 1}
    client = threading.Thread(target=lambda: found.append(shop.post("/v1/recommend", asked).json()))
    client.start()
    wait_until(lambda: shop.scheduler.pending)
    for name in ("spring.tsv", "autumn.tsv"):
        assert shop.post("/catalog", {"file": name}).status_code == 200
    assert listed(shop) == {"default": ("default@3", "default@2")}
    shop.scheduler.release()
    client.join(PATIENCE_S)
    assert (found[0]["catalog"], found[0]["items"][0]["title"]) == ("default@1", "Title of apple")
    wait_until(lambda: sorted(shop.scheduler.engine.catalogs._living) == [2, 3])


def test_answers_over_http_while_catalogs_change(tmp_path: Path) -> None:
    """Each answer's bits are those of its request alone on the revision that the answer reports."""
    model = write_shop(tmp_path)
    for seed in (1, 2, 3):
        write_catalog(model / f"{seed}.json", seed)
    bodies = [
        {"input_ids": [list(prompt(4 + i, i)), list(prompt(9, i))], "sampling_params": {"n": 1 + i}} for i in range(6)
    ]
    engine = open_engine(model, sid_vocab_file=model / "1.json", queue_size=64)
    scheduler = Scheduler(engine)
    scheduler.start()
    seed_of = {"default@1": 1}
    answers: list[tuple[int, Any]] = []
    done = threading.Event()
    with running(scheduler, ServerConfig(port=0, catalog_dir=model)) as server:

        def client(number: int) -> None:
            rng = random.Random(number)
            while not done.is_set():
                index = rng.randrange(len(bodies))
                answers.append((index, server.post("/generate", bodies[index]).json()))

        clients = [threading.Thread(target=client, args=(number,)) for number in range(3)]
        for thread in clients:
            thread.start()
        try:
            for change in range(24):
                if change % 3 == 2:
                    assert server.post("/catalog/rollback", {}).status_code == 200
                else:
                    seed = 1 + (change + change // 3) % 3
                    label = server.post("/catalog", {"file": f"{seed}.json"}).json()["active"]["catalog"]
                    seed_of[label] = seed
        finally:
            done.set()
            for thread in clients:
                thread.join(PATIENCE_S)
        alone: dict[tuple[int, int], Any] = {}
        for seed in (1, 2, 3):
            server.post("/catalog", {"name": "alone", "file": f"{seed}.json"})
            for index, body in enumerate(bodies):
                params = body["sampling_params"] | {"catalog": "alone"}  # type: ignore[operator]
                alone[seed, index] = beams(server.post("/generate", body | {"sampling_params": params}).json())
        for index, answer in answers:
            labels = {one["meta_info"]["catalog"] for one in answer}
            assert len(labels) == 1
            assert beams(answer) == alone[seed_of[labels.pop()], index]
        assert len({one["meta_info"]["catalog"] for _, answer in answers for one in answer}) >= 5
        server.client.post("/flush_cache")
        wait_until(lambda: engine.stats()["free_pages"] == engine.stats()["usable_pages"])
    engine.close()


def beams(answers: Any) -> list[list[tuple[Any, ...]]]:
    """Tokens, scores (exact float32) and items of every beam of every prompt."""
    return [
        [
            (beam["output_ids"], beam["meta_info"]["sequence_score"], beam["meta_info"]["items"])
            for beam in answer["meta_info"]["beam_results"]
        ]
        for answer in answers
    ]
