"""The soak: each request alone first, then minutes of mixed load, then what is wrong, held, or has grown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from flashrec.errors import ConfigError
from flashrec_harness import hardware
from flashrec_harness.http_client import Client
from flashrec_harness.material import load_material
from flashrec_harness.outcome import Band, Check, Outcome, Plot, Series, SuiteContext
from flashrec_harness.servers import flashrec_server
from flashrec_harness.soak import watch
from flashrec_harness.soak.cases import WIDEST, Case, alone, roster
from flashrec_harness.soak.traffic import DISTURBANCES, Tally, Traffic
from flashrec_harness.soak.watch import Held, Memory

SUITE = "soak"
_ENOUGH = 60
"""Memory samples below which the bumps of reloads decide."""
_LONGEST = 300
_POOL_TOKENS = 8192
"""On a CPU: less than the prompts of all cases take, so that the cache evicts, and full within the warm-up."""

_GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": str(4 << 20), "MALLOC_TRIM_THRESHOLD_": str(4 << 20)}
"""Makes glibc give large blocks back when they are freed: resident memory then is what the server holds. Otherwise it
keeps up to 60 MiB of a CPU engine's tensors, now and then (of 920; two runs of five minutes grew by 2.0 and 3.9 %)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakSettings:
    """``cases`` different requests are sent again and again, and a share ``cancelled`` of them is left before its
    answer; ``without`` names the disturbances of :data:`~flashrec_harness.soak.traffic.DISTURBANCES` to leave out.
    Resident memory may grow by the share ``flat``.
    """

    minutes: float = 20.0
    concurrency: int = 8
    cases: int = 64
    cancelled: float = 0.1
    without: tuple[str, ...] = ()
    flat: float = 0.02

    def __post_init__(self) -> None:
        unknown = sorted(set(self.without) - set(DISTURBANCES))
        if unknown:
            raise ConfigError(f"without: no {unknown[0]!r}; there are {', '.join(DISTURBANCES)}")

    @property
    def seconds(self) -> float:
        """Length of the load."""
        return 60.0 * self.minutes

    @property
    def warm_up_s(self) -> float:
        """Memory before this does not count: the allocator, the threads and the cache reach their size."""
        return min(120.0, self.seconds / 3)

    @property
    def patience_s(self) -> float:
        """How long the server may take to let go of the last requests."""
        return min(60.0, max(15.0, self.seconds / 4))

    @property
    def sample_s(self) -> float:
        """Seconds between two samples of memory: a second, or less where the load would leave too few."""
        return min(1.0, self.seconds / (2 * _ENOUGH))


QUICK = SoakSettings(minutes=0.75, cases=24, cancelled=0.3, flat=0.05)
"""The short form: every rule but the long look at memory, which grows by a few per cent as it settles."""


def run(context: SuiteContext, settings: SoakSettings | None = None) -> list[Check]:
    """Load our server on ``context``'s checkpoint (or the one at ``context.url``) and judge it."""
    settings = settings or SoakSettings()
    cases = roster(load_material(context), settings.cases, context.seed, longest=_LONGEST)
    with _server(context) as (url, pid):
        with Client(url) as client:
            catalog = _reload_body(client, context)
            expected = alone(cases, lambda case: _answer(client, case))
            before = watch.held(client, settings.patience_s)
        files = watch.open_files(pid)
        with Client(url) as client:
            traffic = Traffic(
                client,
                cases,
                expected,
                concurrency=settings.concurrency,
                seed=context.seed,
                cancelled=settings.cancelled,
                without=settings.without,
                catalog=catalog,
            )
            waves = _counter(client, "waves")
            with watch.watched(pid, settings.sample_s) as memory:
                traffic.run(settings.seconds)
            waves = _counter(client, "waves") - waves
            after = watch.held(client, settings.patience_s)
            repeated = alone(cases, lambda case: _answer(client, case))
        grown_files = None if files is None else (watch.open_files(pid) or 0) - files
    tally = traffic.tally
    return [
        _mixed(tally, settings, waves, reloads=catalog is not None),
        _right(tally, cases, [case.name for case in cases if repeated[case.name] != expected[case.name]]),
        _no_server_errors(tally, settings),
        _no_leaks(before, after, grown_files),
        _flat(memory, settings, pid),
    ]


@contextmanager
def _server(context: SuiteContext) -> Iterator[tuple[str, int | None]]:
    if context.url is not None:
        yield context.url, None
        return
    layout = ("--sid", context.sid) if context.sid else ()
    catalogs = ("--catalog-dir", str(context.sid_vocab_file.parent)) if context.sid_vocab_file else ()
    pool = () if hardware.has_gpu() else ("--kv-pool-tokens", str(_POOL_TOKENS))
    with flashrec_server(
        context.model_path,
        sid_vocab_file=context.sid_vocab_file,
        arguments=(*layout, *catalogs, *pool, "--max-beam-width", str(WIDEST)),
        env=_GIVES_BACK,
        log_dir=context.out_dir,
    ) as server:
        yield server.url, server.process.pid


def _answer(client: Client, case: Case) -> bytes:
    reply = client.post(case.path, case.payload)
    if reply.status != 200:
        raise RuntimeError(f"{case.name}, alone: {reply.status} {reply.content[:300].decode(errors='replace')}")
    return reply.content


def _reload_body(client: Client, context: SuiteContext) -> bytes | None:
    """What makes the server read its catalog again: the same file, so that no answer may change.

    ``None`` where there is no catalog, or where another's server does not take it.
    """
    if context.sid_vocab_file is None:
        return None
    body = orjson.dumps({"file": context.sid_vocab_file.name})
    reply = client.post("/catalog", body)
    if reply.status == 200:
        return body
    if context.url is None:
        raise RuntimeError(f"POST /catalog: {reply.status} {reply.content[:300].decode(errors='replace')}")
    return None


def _counter(client: Client, name: str) -> int:
    info: Any = orjson.loads(client.get("/server_info").content)
    return int(info["engine"][name])


def _mixed(tally: Tally, settings: SoakSettings, waves: int, *, reloads: bool) -> Check:
    """The load must have been what it says, or the checks below saw nothing."""
    seen = {
        kind: sum(count for name, count in tally.statuses.items() if name.startswith(kind)) for kind in DISTURBANCES
    }
    wanted = [kind for kind in DISTURBANCES if kind not in settings.without and (kind != "reload" or reloads)]
    absent = [kind for kind in wanted if not seen[kind]]
    reasons = [f"no {kind} happened" for kind in absent]
    if settings.concurrency > 1 and waves >= tally.compared:
        reasons.append("no two requests shared a wave")
    widths = f"n {min(tally.widths, default=0)} to {max(tally.widths, default=0)}"
    skipped = ", ".join([*settings.without, *([] if reloads else ["reload (the server has no POST /catalog)"])])
    return Check(
        SUITE,
        "the load was mixed",
        Outcome.INVALID if reasons else Outcome.PASS,
        f"{tally.sent} requests of {settings.concurrency} clients in {settings.minutes:g} minutes, {widths}, {waves} "
        "waves; "
        + ", ".join(f"{count} {kind}" for kind, count in seen.items())
        + (f"; left out: {skipped}" if skipped else ""),
        reason="; ".join(reasons),
        rows=[{"what": name, "count": count} for name, count in sorted(tally.statuses.items())],
        data={"settings": asdict(settings), "waves": waves},
    )


def _right(tally: Tally, cases: Sequence[Case], changed: Sequence[str]) -> Check:
    wrong = tally.wrong_total + len(changed)
    bound = f"a rate below {3 / tally.compared:.2g} at 95 %" if tally.compared and not wrong else ""
    found = Check(
        SUITE,
        "answers equal those given alone",
        Outcome.PASS,
        f"{tally.compared} answers of {len(cases)} requests compared by digest, {tally.wrong_total} differ, and "
        f"{len(changed)} of {len(cases)} asked again alone afterwards; {bound or 'no bound'}",
        rows=[{"wrong": text} for text in (*tally.wrong, *(f"alone again: {name}" for name in changed))],
        data={"compared": tally.compared, "wrong": wrong},
    )
    if wrong:
        found.outcome, found.reason = Outcome.FAIL, (tally.wrong or [f"alone again: {changed[0]}"])[0]
    elif tally.compared < len(cases):
        found.outcome, found.reason = Outcome.INCONCLUSIVE, f"only {tally.compared} answers came back"
    return found


def _no_server_errors(tally: Tally, settings: SoakSettings) -> Check:
    found = Check(
        SUITE,
        "no server error but 503 and 504, no hang",
        Outcome.FAIL if tally.unexpected_total else Outcome.PASS,
        f"{tally.unexpected_total} of {tally.sent} requests got an answer that they may not get, or none",
        rows=[{"unexpected": text} for text in tally.unexpected],
        data={"statuses": dict(tally.statuses)},
    )
    if tally.unexpected:
        found.reason = tally.unexpected[0]
    elif "deadline" not in settings.without and not any("504" in name for name in tally.statuses):
        found.summary += "; no deadline passed, so no 504 was seen"
    return found


def _no_leaks(before: Held, after: Held, grown_files: int | None) -> Check:
    leaks = after.leaks | ({"files": grown_files} if grown_files and grown_files > 2 else {})
    files = "files not counted" if grown_files is None else f"{grown_files:+d} open files"
    return Check(
        SUITE,
        "nothing is held when nothing runs",
        Outcome.FAIL if leaks else Outcome.PASS,
        f"after the load: {after.requests} requests, {after.queued} queued, {after.rows} rows, {after.lost_pages} lost "
        f"and {after.pinned_pages} pinned of {after.usable_pages} pages; {files}",
        reason=", ".join(f"{count} {name.replace('_', ' ')}" for name, count in leaks.items()),
        rows=[{"when": "before", **asdict(before)}, {"when": "after", **asdict(after)}],
        data=asdict(after),
    )


def _flat(memory: Memory, settings: SoakSettings, pid: int | None) -> Check:
    name = f"memory is flat within {settings.flat:.0%}"
    if pid is None:
        return Check(SUITE, name, Outcome.NOT_RUN, "", reason="--url: the server's process is not this harness's")
    if sum(second >= settings.warm_up_s for second in memory.seconds) < _ENOUGH:
        reason = f"fewer than {_ENOUGH} samples after the warm-up: soak for longer"
        return Check(SUITE, name, Outcome.NOT_RUN, f"{len(memory.mib)} samples", reason=reason)
    first, last = memory.growth(settings.warm_up_s)
    change = last / first - 1
    floor = memory.growth(settings.warm_up_s, 0.1)
    return Check(
        SUITE,
        name,
        Outcome.PASS if change <= settings.flat else Outcome.FAIL,
        f"resident {first:.1f} MiB in the first fifth after a warm-up of {settings.warm_up_s:g} s, {last:.1f} in the "
        f"last: {change:+.2%} (medians; floors {floor[0]:.1f} and {floor[1]:.1f}); {len(memory.mib)} samples",
        reason="" if change <= settings.flat else f"resident memory grew by {change:.2%}",
        data={"first_mib": first, "last_mib": last, "floors_mib": floor, "warm_up_s": settings.warm_up_s},
        plots=[
            Plot(
                title="resident memory of the server",
                x_label="seconds",
                y_label="MiB",
                series=[Series("resident", memory.seconds, memory.mib, style="line")],
                bands=[Band(first, first * (1 + settings.flat), "allowed")],
            )
        ],
    )
