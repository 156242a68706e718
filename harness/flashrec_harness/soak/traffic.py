"""The mixed load: clients that ask, leave, hurry and err, and an operator who reloads, flushes and looks."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import orjson

from flashrec_harness.http_client import Client, HangError, Reply
from flashrec_harness.soak.cases import Case, digest

DISTURBANCES = ("cancel", "deadline", "mistake", "flush", "reload")
_SHARES = {"deadline": 0.08, "mistake": 0.02}
"""Of all requests, beside those that are cancelled; the others are asked and compared."""
_STAYS_S = (0.0, 0.005, 0.05, 0.2, 0.5)
"""How long a client that leaves waits first: in the queue, in a wave, or while the answer is written."""
_OPERATOR_S = 2.0
"""Seconds between two acts of the operator."""
_MISTAKES = (b"{", b"{}", b'{"input_ids": [-1]}', b'{"text": "x", "sampling_params": {"n": 0}}', b"[" * 500)
_KEPT = 20


@dataclass(slots=True)
class Tally:
    """What happened. ``wrong`` are answers that differ from the one alone, ``refused`` what may not happen at all."""

    compared: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    wrong_total: int = 0
    unexpected: list[str] = field(default_factory=list)
    unexpected_total: int = 0
    widths: Counter[int] = field(default_factory=Counter)

    @property
    def sent(self) -> int:
        """Requests of clients and operator, answered or not."""
        return self.statuses.total()

    def note(self, kind: str, reply: Reply, allowed: Sequence[int], what: str) -> bool:
        """Count a reply; whether it has a status that may be."""
        self.statuses[f"{kind} {reply.status}"] += 1
        if reply.status in allowed:
            return True
        self.blame(f"{what}: {reply.status} {reply.content[:200].decode(errors='replace')}")
        return False

    def blame(self, text: str) -> None:
        """Something that must not happen."""
        self.unexpected_total += 1
        self.unexpected = [*self.unexpected, text][:_KEPT]

    def compare(self, case: Case, found: str, expected: str) -> None:
        """One answer against the one that was given alone."""
        self.compared += 1
        self.widths[case.n] += 1
        if found != expected:
            self.wrong_total += 1
            self.wrong = [*self.wrong, f"{case.name}: digest {found}, alone {expected}"][:_KEPT]


class Traffic:
    """``concurrency`` clients in a closed loop for ``seconds``, and an operator beside them.

    ``expected`` holds each case's digest alone; ``catalog`` is the body of a reload, ``None`` where the server has
    none. A share ``cancelled`` of the requests is left before the answer. ``without`` names :data:`DISTURBANCES` to
    leave out.
    """

    def __init__(
        self,
        client: Client,
        cases: Sequence[Case],
        expected: Mapping[str, str],
        *,
        concurrency: int,
        seed: int,
        cancelled: float = 0.1,
        without: Sequence[str] = (),
        catalog: bytes | None = None,
    ) -> None:
        self.tally = Tally()
        self._client, self._cases, self._expected = client, cases, expected
        self._concurrency, self._seed = concurrency, seed
        self._without, self._catalog = frozenset(without), catalog
        shares = _SHARES | {"cancel": cancelled}
        self._shares = {kind: share for kind, share in shares.items() if kind not in self._without}
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def run(self, seconds: float) -> None:
        """Returns when every client has ended."""
        roles = [threading.Thread(target=self._ask, args=(number,)) for number in range(self._concurrency)]
        roles.append(threading.Thread(target=self._operate))
        for role in roles:
            role.start()
        self._stop.wait(seconds)
        self._stop.set()
        for role in roles:
            role.join()

    def _ask(self, number: int) -> None:
        rng = random.Random(f"{self._seed} {number}")
        shares = self._shares
        while not self._stop.is_set():
            case = rng.choice(self._cases)
            kind = rng.choices([*shares, "plain"], [*shares.values(), 1 - sum(shares.values())])[0]
            self._guarded(kind, case, rng)

    def _guarded(self, kind: str, case: Case, rng: random.Random) -> None:
        try:
            {"plain": self._plain, "cancel": self._cancel, "deadline": self._hurry, "mistake": self._err}[kind](
                case, rng
            )
        except HangError as error:
            with self._lock:
                self.tally.blame(f"{case.name}: {error}")
        except OSError as error:
            with self._lock:
                self.tally.blame(f"{case.name}: {kind}: {type(error).__name__}: {error}")
            time.sleep(0.1)

    def _plain(self, case: Case, _: random.Random) -> None:
        self._answered("plain", case, case.payload, (200, 503))

    def _hurry(self, case: Case, rng: random.Random) -> None:
        body = orjson.loads(case.payload) | {"timeout": rng.choice((0.001, 0.01, 0.05, 0.2))}
        self._answered("deadline", case, orjson.dumps(body), (200, 503, 504))

    def _answered(self, kind: str, case: Case, payload: bytes, allowed: Sequence[int]) -> None:
        reply = self._client.post(case.path, payload)
        found = digest(reply.content) if reply.status == 200 else ""
        with self._lock:
            if self.tally.note(kind, reply, allowed, case.name) and found:
                self.tally.compare(case, found, self._expected[case.name])

    def _cancel(self, case: Case, rng: random.Random) -> None:
        sent = 1.0 if rng.random() < 0.8 else rng.random()
        self._client.leave(case.path, case.payload, rng.choice(_STAYS_S), sent=sent, reset=rng.random() < 0.5)
        with self._lock:
            self.tally.statuses["cancel"] += 1

    def _err(self, case: Case, rng: random.Random) -> None:
        reply = self._client.post(case.path, rng.choice(_MISTAKES))
        with self._lock:
            self.tally.note("mistake", reply, (400, 503), f"a mistake at {case.path}")

    def _operate(self) -> None:
        acts = [("look", "GET", path) for path in ("/metrics", "/health", "/server_info", "/v1/models")]
        acts += [("flush", "POST", "/flush_cache")] * ("flush" not in self._without)
        acts += [("reload", "POST", "/catalog")] * (self._catalog is not None and "reload" not in self._without)
        for turn in range(1 << 30):
            if self._stop.wait(_OPERATOR_S):
                return
            kind, method, path = acts[turn % len(acts)]
            try:
                payload = (self._catalog or b"") if kind == "reload" else b""
                reply = self._client.get(path) if method == "GET" else self._client.post(path, payload)
            except (HangError, OSError) as error:
                with self._lock:
                    self.tally.blame(f"{kind} {path}: {type(error).__name__}: {error}")
                continue
            with self._lock:
                self.tally.note(kind, reply, (200, 503), f"{kind} {path}")
