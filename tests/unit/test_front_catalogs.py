"""Catalogs change between the reading of a request and its queueing: it is answered from what it was read against."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from server_support import FakeScheduler, Running, make_scheduler, running, wait_until
from test_front import ROWS, Pair, connect

from flashrec.errors import DeadlineError
from flashrec.front.board import Board
from flashrec.front.hub import Hub
from flashrec.server.config import ServerConfig
from flashrec.server.pins import Pins

MESSAGES = [{"role": "user", "content": "x"}]
SEARCHES: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"text": ["x", "y"], "sampling_params": {"n": 2}}),
    ("/v1/completions", {"prompt": ["x", "y"], "n": 2}),
    ("/v1/chat/completions", {"messages": MESSAGES, "n": 2}),
    ("/v1/recommend", {"history": ["apple"], "k": 2}),
]


def board() -> Board:
    return Board(multiprocessing.get_context("spawn"), 1)


@pytest.fixture
def new(tmp_path: Path) -> Path:
    path = tmp_path / "new.tsv"
    path.write_text("\n".join(ROWS) + "\n")
    return path


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    fake = make_scheduler(tmp_path)
    fake.on_change = lambda: None  # type: ignore[attr-defined]
    (tmp_path / "files").mkdir()
    shared = board()
    hub = Hub(fake, shared, tmp_path / "files")  # type: ignore[arg-type]
    yield Pair(fake, hub, *connect(hub, shared))
    hub.close()


@pytest.fixture(params=["one process", "a front"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Running]:
    """The HTTP application over the engine's own scheduler, and over a front's."""
    if request.param == "a front":
        scheduler: Any = request.getfixturevalue("pair").front
    else:
        scheduler = make_scheduler(tmp_path)
    with running(scheduler, ServerConfig(port=0)) as server:
        yield server


def before_queueing(server: Running, change: Callable[[Any], object], patch: pytest.MonkeyPatch) -> None:
    """Let ``change`` act on the scheduler when a request has been read and is about to be queued."""
    submit_all = server.scheduler.submit_all

    def change_then_submit(*arguments: Any) -> Any:
        change(server.scheduler)
        return submit_all(*arguments)

    patch.setattr(server.scheduler, "submit_all", change_then_submit)


def living(fake: FakeScheduler) -> list[int]:
    """The revisions that the engine keeps on its device."""
    return sorted(fake.engine.catalogs._living)


def named(fake: FakeScheduler) -> list[int]:
    """The revisions that names stand for."""
    return [one.revision for place in fake.engine.catalogs.places().values() for one in place.revisions]


@pytest.mark.parametrize(("path", "body"), SEARCHES)
def test_two_reloads_before_a_request_is_queued(
    server: Running, path: str, body: dict[str, Any], new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice(scheduler: Any) -> None:
        for _ in range(2):
            scheduler.load_catalog("default", new)

    usual = server.post(path, body).json()
    before_queueing(server, twice, monkeypatch)
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    assert untold(response.json()) == untold(usual)
    assert "default@1" in response.text
    assert server.scheduler.engine.catalogs.places()["default"].active.label == "default@3"


@pytest.mark.parametrize(
    ("wanted", "change"),
    [
        ("fall", lambda scheduler, new: scheduler.drop_catalog("fall")),
        ("fall@2", lambda scheduler, new: scheduler.drop_catalog("fall")),
        ("default@3", lambda scheduler, new: scheduler.load_catalog("default", new, activate=False)),
    ],
)
def test_what_a_client_names_may_go_before_its_request_is_queued(
    server: Running, new: Path, wanted: str, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who comes when nobody holds it any more is told that it is not there."""
    server.scheduler.load_catalog("fall", new)
    server.scheduler.load_catalog("default", new, activate=False)
    before_queueing(server, lambda scheduler: change(scheduler, new), monkeypatch)
    response = server.post("/generate", {"text": "x", "sampling_params": {"catalog": wanted}})
    assert response.status_code == 200, response.text
    assert response.json()["meta_info"]["items"] == ["solo", "duo"]
    monkeypatch.undo()
    # The thread that hands over an answer holds it until it runs again, which may be after the client has read it.
    wait_until(
        lambda: server.post("/generate", {"text": "x", "sampling_params": {"catalog": wanted}}).status_code == 400
    )


def test_the_engine_is_two_reloads_ahead_of_its_fronts(pair: Pair, new: Path) -> None:
    """Other fronts' changes, which this one has not been told of yet."""
    for _ in range(2):
        pair.fake.load_catalog("default", new)
    assert pair.ask("a").result(5).catalog == "default@1"


def test_the_engine_keeps_what_its_fronts_hold_and_no_more(pair: Pair, new: Path) -> None:
    """When a change returns, what no front holds has gone, so that the next one finds its room."""
    _, other, _ = connect(pair.hub, board())
    for _ in range(3):
        pair.front.load_catalog("default", new)
        assert living(pair.fake) == sorted(named(pair.fake))
    mine, theirs = Pins(pair.front.engine), Pins(other.engine)
    assert mine.label(None, None) == theirs.label(None, None) == "default@4"
    for _ in range(2):
        other.load_catalog("default", new)
    assert living(pair.fake) == [4, 5, 6]
    del mine
    assert pair.front.flush_cache() == 7, "what it has sent before has arrived"
    assert living(pair.fake) == [4, 5, 6], "the other one still holds it"
    del theirs
    wait_until(lambda: living(pair.fake) == [5, 6])


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/generate", {"text": "x", "sampling_params": {"n": 2}}, 200),
        ("/generate", {"text": "x", "sampling_params": {"n": 65}}, 400),
        ("/generate", {"text": "x", "sampling_params": {"exclude": [[9, 9]]}}, 400),
        ("/v1/recommend", {"history": ["elm"]}, 400),
        ("/v1/completions", {"prompt": ["x", "y"], "n": 65}, 400),
        ("/v1/completions", {"prompt": "x"}, 504),
    ],
)
def test_an_answer_of_any_kind_holds_nothing(
    server: Running, path: str, body: dict[str, Any], status: int, new: Path, request: pytest.FixtureRequest
) -> None:
    """Not until the garbage collector comes round: on the device a revision is too large for that."""
    fake = server.scheduler if isinstance(server.scheduler, FakeScheduler) else request.getfixturevalue("pair").fake
    fake.fail = DeadlineError("late") if status == 504 else None
    gc.collect()
    gc.disable()
    try:
        assert server.post(path, body).status_code == status
        fake.fail = None  # an error holds the frames that it went through
        for _ in range(2):
            server.scheduler.load_catalog("default", new)
        wait_until(lambda: living(fake) == [2, 3], 2)
    finally:
        gc.enable()


def test_a_front_that_goes_lets_go_of_its_catalogs(pair: Pair, new: Path) -> None:
    held = pair.front.engine.catalogs.find(None)
    for _ in range(2):
        pair.front.load_catalog("default", new)
    assert living(pair.fake) == [1, 2, 3]
    pair.desk.close()
    wait_until(lambda: living(pair.fake) == [2, 3])
    assert held is not None


def untold(answer: Any) -> Any:
    """An answer without what no two requests share."""
    if isinstance(answer, list):
        return [untold(each) for each in answer]
    if isinstance(answer, dict):
        return {key: untold(value) for key, value in answer.items() if key not in ("id", "created")}
    return answer
