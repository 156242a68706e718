"""A scheduler without a model, and a server on a real socket, for the server's tests."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel
from transformers import PreTrainedTokenizerFast

from flashrec.config import EngineConfig
from flashrec.errors import RequestError
from flashrec.profiler import ProfileOptions, Profiler
from flashrec.request import Beam, Request, Result, ScoreSpace
from flashrec.runtime.catalogs import DEFAULT, Catalogs, Place
from flashrec.server.app import create_app
from flashrec.server.config import ServerConfig
from flashrec.server.context import Context
from flashrec.server.run import DrainingServer, bind
from flashrec.sid.catalog import Catalog
from flashrec.sid.layout import SidLayout, infer_layout

MAX_WIDTH, MAX_CONTEXT, MAX_STEPS = 64, 512, 8
ITEMS = {(0, 0): ["apple", "pear"], (0, 2): ["plum"], (1, 1): ["kiwi"], (2, 0): ["42"]}
"""SIDs and their items; ``apple`` and ``pear`` share one."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, no merges: 256 byte tokens, then two codebooks of 3 and the SID's brackets."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    codes = [f"<s_{level}_{code}>" for level in "ab" for code in range(3)]
    tokenizer.add_tokens([*codes, "<|sid_begin|>", "<|sid_end|>", "<|im_end|>"], special_tokens=True)
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    return tokenizer


def write_catalog(directory: Path) -> Path:
    path = directory / "items.tsv"
    rows = ["item_id\tsid\ttitle"]
    for (a, b), items in ITEMS.items():
        rows += [f"{item}\t<s_a_{a}><s_b_{b}>\tTitle of {item}" for item in items]
    path.write_text("\n".join(rows) + "\n")
    return path


def write_checkpoint(directory: Path) -> Path:
    """A Qwen3 of two layers with random weights (seeded), its tokenizer, and a catalog beside it."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=264,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    write_catalog(directory)
    return directory


@dataclass
class FakeEngine:
    """Validates like an engine with a vocabulary of 265; knows no model."""

    config: EngineConfig
    tokenizer: Any
    catalogs: Catalogs
    profiler: Profiler = field(default_factory=Profiler)

    @property
    def layout(self) -> SidLayout | None:
        return self.catalogs.layout

    @property
    def catalog(self) -> Catalog | None:
        served = self.catalogs.find(None)
        return None if served is None else served.catalog

    def prepare(self, request: Request) -> None:
        self.catalogs.find(request.catalog)
        width = request.beam_width or request.n
        for name, wrong, why in (
            ("n", request.n > width, "above beam_width"),
            ("n" if request.beam_width is None else "beam_width", width > MAX_WIDTH, "above the budget"),
            ("input_ids", not request.input_ids, "the prompt is empty"),
            ("input_ids", len(request.input_ids) > MAX_CONTEXT, "too long"),
            ("input_ids", any(token >= len(self.tokenizer) for token in request.input_ids), "out of range"),
            ("max_tokens", self.catalog is None and not request.max_tokens, "is required"),
            ("exclude_items", "unknown" in request.exclude_items, "no such item"),
            ("allow_sids", (9, 9) in (request.allow_sids or ()), "no such SID"),
        ):
            if wrong:
                raise RequestError(name, why)

    def stats(self) -> dict[str, Any]:
        return {"waves": 3, "kernels": {"rms_norm": "torch"}, "pages": {"free": 5, "used": 2}, "buckets": {16: 4}}


class FakeScheduler:
    """Answers at once with the catalog's first SIDs, scored -1/8, -2/8, ...; or holds what it is told to."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.submitted: list[Request] = []
        self.deadlines: list[float | None] = []
        self.cancelled: list[str] = []
        self.pending: dict[str, Future[Result]] = {}
        self.hold = False
        self.refuse: Exception | None = None
        self.fail: Exception | None = None
        self.flushes = 0
        self.closed = False

    @property
    def queue_depth(self) -> int:
        return len(self.pending)

    @property
    def rows_in_flight(self) -> int:
        return sum(request.n for request in self.submitted if request.rid in self.pending)

    def submit_all(self, requests: Sequence[Request], deadline: float | None = None) -> list[Future[Result]]:
        for index, request in enumerate(requests):
            try:
                self.engine.prepare(request)
            except RequestError as error:
                raise RequestError(
                    f"{error.field}[{index}]" if len(requests) > 1 else error.field, error.message
                ) from None
        if self.refuse is not None:
            raise self.refuse
        return [self._submit(request, deadline) for request in requests]

    def _submit(self, request: Request, deadline: float | None) -> Future[Result]:
        self.submitted.append(request)
        self.deadlines.append(deadline)
        future: Future[Result] = Future()
        if self.hold:
            self.pending[request.rid] = future
        elif self.fail is not None:
            future.set_exception(self.fail)
        else:
            future.set_result(self.result(request))
        return future

    def result(self, request: Request) -> Result:
        served = self.engine.catalogs.find(request.catalog)
        beams = []
        if served is None:
            for rank in range(request.n):
                score = -(rank + 1) / 8
                beams.append(Beam((65 + rank, 66), 2 * score, score, "length"))
        else:
            catalog, layout = served.catalog, served.layout
            for rank in range(min(request.n, catalog.num_sids)):
                sid = tuple(int(code) for code in catalog.sids[rank])
                score = -(rank + 1) / 8
                tokens = (*layout.token_ids(sid), layout.end or 0)
                beams.append(Beam(tokens, 3 * score, score, "stop", sid, catalog.items_of(rank)))
        space, label = (ScoreSpace.VOCAB, None) if served is None else (ScoreSpace.SID, served.label)
        return Result(request.rid, tuple(beams), len(request.input_ids), 16, space, label)

    def cancel(self, rid: str) -> None:
        self.cancelled.append(rid)
        self.pending.pop(rid, None)

    def release(self) -> None:
        """Answer everything that is held."""
        self.hold = False
        for rid, future in list(self.pending.items()):
            request = next(request for request in self.submitted if request.rid == rid)
            del self.pending[rid]
            future.set_result(self.result(request))

    def drain(self, timeout: float) -> bool:
        return not self.pending

    def close(self) -> None:
        self.closed = True

    def flush_cache(self) -> int:
        self.flushes += 1
        return 7

    def load_catalog(self, name: str, path: Path, *, activate: bool = True) -> Place:
        served = self.engine.catalogs.read(name, path)
        self.engine.catalogs.on_read(served)
        return self.engine.catalogs.place(served, activate=activate)

    def rollback_catalog(self, name: str) -> Place:
        return self.engine.catalogs.rollback(name)

    def drop_catalog(self, name: str) -> None:
        self.engine.catalogs.drop(name)

    def start_profile(self, options: ProfileOptions) -> None:
        self.engine.profiler.start(options)

    def stop_profile(self) -> None:
        self.engine.profiler.stop()


def make_scheduler(directory: Path, *, catalog: bool = True) -> FakeScheduler:
    tokenizer = make_tokenizer()
    config = EngineConfig(model_path=directory / "shop-model")
    catalogs = Catalogs(config, infer_layout(tokenizer, depth=2) if catalog else None, torch.device("cpu"))
    if catalog:
        catalogs.place(catalogs.read(DEFAULT, write_catalog(directory)))
    return FakeScheduler(FakeEngine(config, tokenizer, catalogs))


@dataclass
class Running:
    """A server on a free port of the loopback device."""

    client: httpx.Client
    scheduler: Any
    context: Context
    server: DrainingServer
    port: int

    def post(self, path: str, body: object, **kwargs: Any) -> httpx.Response:
        return self.client.post(path, json=body, **kwargs)

    def raw(self, path: str, content: bytes, content_type: str = "application/json") -> httpx.Response:
        return self.client.post(path, content=content, headers={"content-type": content_type})


@contextlib.contextmanager
def running(scheduler: Any, config: ServerConfig) -> Iterator[Running]:
    """Serve ``scheduler`` from a thread; the server has ended when the block has."""
    app = create_app(scheduler, config)
    listener = bind(config.host, config.port)
    port = listener.getsockname()[1]
    server = DrainingServer(app, config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            yield Running(client, scheduler, app.context, server, port)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def wait_until(condition: Any, timeout: float = 10.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "condition not met in time"
        time.sleep(0.005)


def error_of(response: httpx.Response) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(response.content)
    assert list(body) == ["error"]
    return dict(body["error"])
