"""Between the engine's process and one in front of it: what crosses the pipe, and what both ends make of it."""

from __future__ import annotations

import ast
import asyncio
import gzip
import json
import multiprocessing
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server_support import FakeScheduler, make_scheduler, make_tokenizer, wait_until, write_checkpoint

from flashrec import Engine, EngineConfig, Request
from flashrec.errors import CatalogStateError, EngineFault, NonFiniteError, QueueFullError, RequestError
from flashrec.front import remote
from flashrec.front.board import Board
from flashrec.front.desk import Desk
from flashrec.front.hub import Hub
from flashrec.front.link import Link, LinkClosed
from flashrec.front.process import _begin
from flashrec.front.remote import RemoteScheduler, unpack
from flashrec.front.stored import load, store
from flashrec.front.wire import Answer, Hello, InternalError, Ready, Serve, pack
from flashrec.profiler import ProfileOptions, Profiler, trace_range
from flashrec.request import Beam, LazyBeams
from flashrec.server.errors import as_api_error
from flashrec.torch_trace import Span

ROWS = ["item_id\tsid\ttitle", "solo\t<s_a_2><s_b_2>\tThe only one", "duo\t<s_a_2><s_b_2>\tThe other"]


@dataclass
class Pair:
    """A hub over a scheduler without a model, and a front's scheduler, with a real pipe between."""

    fake: FakeScheduler
    hub: Hub
    desk: Desk
    front: RemoteScheduler
    lost: list[EngineFault]

    def ask(self, rid: str, n: int = 2, **fields: Any) -> Any:
        (future,) = self.front.submit_all([Request(input_ids=(1, 2), n=n, rid=rid, **fields)])
        return future


def connect(hub: Hub, board: Board) -> tuple[Desk, RemoteScheduler, list[EngineFault]]:
    ours, theirs = multiprocessing.Pipe()
    desk, link = hub.attach(Link(ours)), Link(theirs)
    hello, serve = link.receive()
    assert isinstance(hello, Hello)
    assert isinstance(serve, Serve)
    front = RemoteScheduler(link, hello, make_tokenizer(), board)
    lost: list[EngineFault] = []
    front.lost = lost.append
    front.hear(serve)

    def hear() -> None:
        try:
            while True:
                for message in link.receive():
                    front.hear(message)
        except LinkClosed:
            front.lose(EngineFault("the engine's process has gone"))

    threading.Thread(target=hear, daemon=True).start()
    return desk, front, lost


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    fake = make_scheduler(tmp_path)
    fake.on_change = lambda: None  # type: ignore[attr-defined]
    board = Board(multiprocessing.get_context("spawn"), 1)
    (tmp_path / "files").mkdir()
    hub = Hub(fake, board, tmp_path / "files")  # type: ignore[arg-type]
    yield Pair(fake, hub, *connect(hub, board))
    hub.close()


def test_an_answer_is_what_the_scheduler_gave(pair: Pair) -> None:
    request = Request(input_ids=(1, 2), n=3, rid="a", catalog="default@1")
    result = pair.ask("a", 3).result(5)
    assert result == pair.fake.result(request)
    assert pair.fake.submitted == [request], "the name is resolved where the beams will be read"


def test_a_list_arrives_together_and_its_error_names_the_place(pair: Pair) -> None:
    bad = [Request(input_ids=(1,), rid="b"), Request(input_ids=(999,), rid="c")]
    first, second = pair.front.submit_all(bad)
    for future in (first, second):
        with pytest.raises(RequestError) as caught:
            future.result(5)
        assert caught.value.field == "input_ids[1]"
    assert pair.fake.submitted == []


@pytest.mark.parametrize(
    "error", [QueueFullError("full"), NonFiniteError("nan"), RequestError("n", "too wide"), EngineFault("gone")]
)
def test_errors_arrive_as_they_are(pair: Pair, error: Exception) -> None:
    if isinstance(error, QueueFullError):
        pair.fake.refuse = error
    else:
        pair.fake.fail = error
    with pytest.raises(type(error)) as caught:
        pair.ask("a").result(5)
    assert str(caught.value) == str(error)
    assert vars(caught.value) == vars(error)


def test_another_error_says_what_it_was(pair: Pair) -> None:
    pair.fake.fail = ValueError("surprise")
    with pytest.raises(InternalError, match="ValueError: surprise"):
        pair.ask("a").result(5)
    pair.fake.refuse = KeyError("odd")  # type: ignore[assignment]
    with pytest.raises(InternalError, match="KeyError: 'odd'"):
        pair.ask("b").result(5)
    assert pair.lost == []
    api = as_api_error(InternalError("x"), {}, 1)
    assert (api.status, api.kind) == (500, "internal_error")


def test_a_cancelled_request_is_cancelled_there_and_answered_to_nobody(pair: Pair) -> None:
    pair.fake.hold = True
    future = pair.ask("a")
    wait_until(lambda: "a" in pair.fake.pending)
    pair.front.cancel("a")
    wait_until(lambda: pair.fake.cancelled == ["a"])
    assert future.cancelled()
    assert pair.front.drain(1.0)


def test_a_front_that_goes_takes_its_requests_with_it(pair: Pair) -> None:
    pair.fake.hold = True
    for rid in "abc":
        pair.ask(rid)
    wait_until(lambda: len(pair.fake.pending) == 3)
    pair.desk.close()
    wait_until(lambda: sorted(pair.fake.cancelled) == ["a", "b", "c"])
    wait_until(lambda: len(pair.lost) == 1)
    with pytest.raises(EngineFault, match="has gone"):
        pair.ask("d")


def test_an_engine_that_goes_fails_whoever_waits(pair: Pair) -> None:
    pair.fake.hold = True
    future = pair.ask("a")
    wait_until(lambda: "a" in pair.fake.pending)
    pair.hub.close()
    with pytest.raises(EngineFault, match="engine's process has gone"):
        future.result(5)
    with pytest.raises(EngineFault, match="engine's process has gone"):
        pair.front.flush_cache()


def test_calls_cross_with_their_results_and_errors(pair: Pair) -> None:
    assert pair.front.flush_cache() == 7
    assert pair.fake.flushes == 1
    assert pair.front.engine.stats() == pair.fake.engine.stats()
    assert pair.front.engine.profiler.status()["state"] == "idle"
    with pytest.raises(CatalogStateError, match="no other revision"):
        pair.front.rollback_catalog("default")


@pytest.mark.parametrize("ended_by", ["a front", "its number of steps", "its next stage"])
def test_the_spans_of_every_front_are_in_the_trace_and_come_together(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended_by: str
) -> None:
    profiler = pair.fake.engine.profiler
    desk, other, _ = connect(pair.hub, pair.front._board)
    sent: list[int] = []
    for front in (pair.front, other):
        send = front._link.send
        send(Ready())

        def counting(*messages: object, send: Any = send) -> None:
            sent.append(len(messages))
            send(*messages)

        monkeypatch.setattr(front._link, "send", counting)
    wait_until(lambda: pair.desk.ready.done() and desk.ready.done())
    with monkeypatch.context() as patch:
        patch.setattr(trace_range, "watch", pair.front)
        with trace_range("flashrec.early"):  # nothing records: not sent
            pass
    pair.front.start_profile(
        ProfileOptions(output_dir=tmp_path / "trace", num_steps=1, profile_by_stage=ended_by == "its next stage")
    )
    profiler.on_forward("prefill")
    sent.clear()
    for _ in range(20):
        for process, front in enumerate((pair.front, other)):
            front.show(Span("flashrec.respond", process, 1, time.time_ns(), time.time_ns()))
    assert len(sent) < 10
    if ended_by == "a front":
        other.stop_profile()
    elif ended_by == "its number of steps":
        profiler.on_wave_end()
    else:
        profiler.on_forward("decode")
        profiler.on_wave_end()
    assert profiler.wait(60)
    file = Path(profiler.status()["files"][0])  # type: ignore[index]
    with gzip.open(file) as stream:
        spans = [event["pid"] for event in json.load(stream)["traceEvents"] if event["name"] == "flashrec.respond"]
    assert sorted(spans) == [0] * 20 + [1] * 20
    assert b"flashrec.early" not in gzip.decompress(file.read_bytes())


def test_a_stage_keeps_its_spans_when_the_next_one_is_written_first(tmp_path: Path) -> None:
    profiler = Profiler()
    decode_is_written = threading.Event()
    calls = iter(range(2))

    def collect() -> None:
        if next(calls) == 0:  # the prefill's capture ends first
            assert decode_is_written.wait(30)

    profiler.collect = collect
    profiler.start(ProfileOptions(output_dir=tmp_path, num_steps=1, profile_by_stage=True))
    profiler.on_forward("prefill")
    profiler.add(Span("flashrec.early", 1, 1, time.time_ns(), time.time_ns()))
    profiler.on_forward("decode")
    time.sleep(0.001)
    profiler.add(Span("flashrec.late", 1, 1, time.time_ns(), time.time_ns()))
    profiler.on_wave_end()
    _, late = profiler._flushes
    late.join(60)
    decode_is_written.set()
    assert profiler.wait(60)
    names = []
    for file in profiler.status()["files"]:  # type: ignore[attr-defined]
        with gzip.open(file) as stream:
            events = json.load(stream)["traceEvents"]
        names.append([event["name"] for event in events if event["name"] in ("flashrec.early", "flashrec.late")])
    assert names == [["flashrec.early"], ["flashrec.late"]]


def test_catalogs_are_in_force_at_every_front_when_a_change_returns(pair: Pair, tmp_path: Path) -> None:
    _, other, _ = connect(pair.hub, Board(multiprocessing.get_context("spawn"), 1))
    new = tmp_path / "new.tsv"
    new.write_text("\n".join(ROWS) + "\n")
    place = pair.front.load_catalog("default", new)
    for front in (pair.front, other):
        served = front.engine.catalogs.find(None)
        assert served is not None
        assert served.label == place.active.label == "default@2"
        assert served.catalog.items_of(0) == ("solo", "duo")
        assert served.catalog.title_of("duo") == "The other"
    assert pair.ask("a").result(5).catalog == "default@2"
    assert pair.front.rollback_catalog("default").active.label == "default@1"
    assert other.engine.catalogs.find(None).label == "default@1"  # type: ignore[union-attr]
    third = pair.front.load_catalog("default", new)
    assert third.active.label == "default@3"
    kept = {path.name for path in (tmp_path / "files").iterdir()}
    assert kept == {"catalog-1", "catalog-3"}, "the files of what no name stands for are deleted"


def test_a_catalog_whose_files_cannot_be_written_is_refused_before_it_serves(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = tmp_path / "new.tsv"
    new.write_text("\n".join(ROWS) + "\n")

    def full(array: object, *_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(CatalogStateError, match="No space left on device; make room there, or set TMPDIR"):
            pair.front.load_catalog("default", new)
    assert pair.fake.engine.catalogs.find(None).label == "default@1"  # type: ignore[union-attr]
    assert pair.ask("a").result(5).catalog == "default@1"
    assert {path.name for path in (tmp_path / "files").iterdir()} == {"catalog-1"}
    assert pair.front.load_catalog("default", new).active.label == "default@3"
    assert pair.ask("b").result(5).catalog == "default@3"


def test_what_goes_wrong_with_one_message_leaves_both_fronts_served(pair: Pair) -> None:
    other_desk, other, _ = connect(pair.hub, Board(multiprocessing.get_context("spawn"), 1))
    pair.front._link.send(Request(input_ids=(1,)), 7)
    assert pair.front.flush_cache() == 7, "what it does not know it passes over"
    pair.hub.scheduler.submit_all = None  # type: ignore[method-assign,assignment]
    with pytest.raises(InternalError, match="TypeError"):
        pair.ask("a").result(5)
    assert not pair.desk.gone
    assert not other_desk.gone
    assert other.flush_cache() == 7


def test_a_request_whose_answer_cannot_be_read_ends_with_the_front(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(input_ids=(1, 2), n=2, rid="a")
    pair.fake.hold = True
    (future,) = pair.front.submit_all([request])
    answer = Answer("a", pack(pair.fake.result(request)))
    monkeypatch.setattr(remote, "unpack", None)
    with pytest.raises(TypeError):
        pair.front.hear(answer)
    pair.front.lose(EngineFault("not understood"))
    with pytest.raises(EngineFault, match="not understood"):
        future.result(5)
    assert pair.front.drain(5)


def test_a_front_that_cannot_act_on_a_message_is_lost_at_once() -> None:
    """Another takes its place, and a change of the catalogs waits for it no longer."""
    ours, theirs = multiprocessing.Pipe()
    engine, link = Link(ours), Link(theirs)
    heard: list[str] = []
    faults: list[str] = []
    lost = asyncio.Event()

    class Front:
        def hear(self, message: str) -> None:
            heard.append(message)
            if message == "cannot":
                raise FileNotFoundError(message)

        def lose(self, fault: EngineFault) -> None:
            faults.append(str(fault))
            lost.set()

    async def serve() -> None:
        _begin(link, Front(), None, None, [])  # type: ignore[arg-type]
        assert engine.receive() == (Ready(),)
        engine.send("can", "cannot")
        engine.send("never")
        await asyncio.wait_for(lost.wait(), 10)
        await asyncio.sleep(0.05)

    asyncio.run(serve())
    assert heard == ["can", "cannot"]
    assert faults == ["this front cannot act on what the engine's process says: FileNotFoundError: cannot"]
    with pytest.raises(LinkClosed):
        engine.receive()


def test_a_front_whose_engine_has_gone_says_so() -> None:
    ours, theirs = multiprocessing.Pipe()
    engine, link = Link(ours), Link(theirs)
    faults: asyncio.Queue[str] = asyncio.Queue()

    class Front:
        def lose(self, fault: EngineFault) -> None:
            faults.put_nowait(str(fault))

    async def serve() -> str:
        _begin(link, Front(), None, None, [])  # type: ignore[arg-type]
        assert engine.receive() == (Ready(),)
        engine.close()
        return await asyncio.wait_for(faults.get(), 10)

    assert asyncio.run(serve()) == "the engine's process has gone"


def test_a_stored_catalog_is_the_same_catalog(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = pair.fake.engine.catalogs.find(None)
    assert served is not None
    monkeypatch.setattr(ast, "parse", None)  # which two threads at once cannot rely on: see flashrec.sid.cache
    copy = load(store(served, tmp_path / "copy"), served.layout)
    for name in ("sids", "item_start"):
        assert np.array_equal(getattr(copy.catalog, name), getattr(served.catalog, name))
    assert list(copy.catalog.items) == list(served.catalog.items)
    assert copy.catalog.titles is not None
    assert list(copy.catalog.titles) == list(served.catalog.titles or ())
    assert copy.catalog.rank([(0, 2), (1, 1), (9, 9)]).tolist() == [1, 2, -1]
    assert copy.catalog.ranks_of_items(["kiwi", "pear"]).tolist() == [0, 2]
    assert (copy.catalog.digest, copy.label) == (served.catalog.digest, served.label)
    assert copy.catalog.plain_items
    assert not copy.catalog.sids.flags.writeable


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def test_beams_are_the_engine_s_to_the_bit(checkpoint: Path, tmp_path: Path) -> None:
    engine = Engine(
        EngineConfig(
            model_path=checkpoint, sid_vocab_file=checkpoint / "items.tsv", device="cpu", kv_pool_tokens=4096,
            invariance_check=False,
        )
    )  # fmt: skip
    requests = [
        Request(input_ids=(1, 2, 3), n=4, rid="a", length_penalty=0.5),
        Request(input_ids=(4, 5), n=3, rid="b", exclude_items=("apple",)),
        Request(input_ids=(6,), n=2, rid="c", allow_items=("pear", "kiwi")),
        Request(input_ids=(7, 8), n=2, rid="d", constrained=False, max_tokens=2),
    ]
    served = engine.catalogs.find(None)
    assert served is not None
    copy = load(store(served, tmp_path / "copy"), served.layout)
    for request, result in zip(requests, engine.generate(requests), strict=True):
        again = unpack(pack(result), request, copy)
        assert isinstance(again.beams, LazyBeams) == (request.rid != "d")
        assert again == result
        assert [beam.score.hex() for beam in again.beams] == [beam.score.hex() for beam in result.beams]
        assert all(isinstance(beam, Beam) for beam in again.beams)


def test_a_link_closed_by_either_end_wakes_who_receives() -> None:
    for closing in (0, 1):
        links = [Link(connection) for connection in multiprocessing.Pipe()]
        threading.Timer(0.05, links[closing].close).start()
        for link in links:
            with pytest.raises(LinkClosed):
                link.receive()
            with pytest.raises(LinkClosed):
                link.send("x")
