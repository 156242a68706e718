"""Measuring and judging an overload: goodput must stay near the capacity, and refusals must be quick."""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from flashrec.errors import ConfigError
from flashrec_harness import hardware
from flashrec_harness.http_client import Client
from flashrec_harness.load import percentile
from flashrec_harness.material import load_material
from flashrec_harness.outcome import Check, Outcome, Plot, Series, SuiteContext
from flashrec_harness.overload.cores import ENOUGH, Cores, divide, kept_to
from flashrec_harness.overload.fleet import THREADS, Fleet, Shot, steady_rate
from flashrec_harness.overload.judge import ERROR, KEPT, interval, verdict
from flashrec_harness.servers import flashrec_server

SUITE = "overload"
_PROMPTS = 64
_RANDOM_TOKENS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class OverloadSettings:
    """In a round ``factor`` times the capacity is offered for twice ``seconds``, between two measurements of the
    capacity of ``seconds`` each that no other round shares. After ``rounds`` rounds the ratio is looked at, ``looks``
    times at most: see :mod:`.judge`. ``clients`` processes send; ``places`` requests are held by a server that is
    started here. ``context`` is the prompts' length in random tokens; without it they come from histories."""

    factor: float = 4.0
    n: int = 32
    seconds: float = 5.0
    rounds: int = 5
    looks: int = 4
    clients: int = 1
    places: int = 64
    context: int | None = None

    def __post_init__(self) -> None:
        if self.rounds < 2 or self.looks < 1:
            raise ConfigError(f"rounds, looks: at least 2 and 1, got {self.rounds} and {self.looks}")


QUICK = OverloadSettings(n=16, seconds=1.5, rounds=3, looks=3, places=24)
"""The short form: half the beams and less than half the places, so that a second and a half holds ten waves."""


@dataclass(frozen=True, slots=True)
class Round:
    """One overload between two capacities, in requests per second; ``offered`` as it was really sent.

    ``taken``: cores of the server's that the clients kept busier under overload than around it.
    """

    capacity_before: float
    offered: float
    goodput: float
    capacity_after: float
    taken: float = 0.0

    @property
    def ratio(self) -> float:
        """Goodput over the capacity around it."""
        return self._share(self.goodput)

    @property
    def ratio_at_most(self) -> float:
        """What :attr:`ratio` could have been had the clients run elsewhere: see :mod:`.judge`."""
        return self.ratio / max(1 - self.taken, 1e-9)

    @property
    def factor(self) -> float:
        """Offered load over the capacity around it."""
        return self._share(self.offered)

    def _share(self, rate: float) -> float:
        capacity = (self.capacity_before + self.capacity_after) / 2
        return rate / capacity if capacity > 0 else 0.0


def run(context: SuiteContext, settings: OverloadSettings | None = None) -> list[Check]:
    """Measure a server that is started here on ``context``'s checkpoint, or the one at ``context.url``."""
    settings = settings or OverloadSettings()
    material = load_material(context)
    known = material.catalog is not None and material.sequences.is_file()
    if settings.context is not None or not known:
        ids = material.random_prompts(_PROMPTS, settings.context or _RANDOM_TOKENS, context.seed)
    else:
        ids = material.history_prompts(_PROMPTS)
    params = {"n": settings.n, "beam_width": settings.n, "temperature": 0}
    params |= {} if material.catalog is not None else {"max_new_tokens": 3}
    payloads = [orjson.dumps({"input_ids": list(prompt), "sampling_params": params}) for prompt in ids]
    with _server(context, settings) as (url, cores), Client(url) as client:
        fleet = Fleet(url, payloads, settings.clients)
        try:
            shared = cores is not None and not cores.divided
            rounds, shots, lost = _rounds(fleet, _places(client, settings), settings, context.seed, shared=shared)
        finally:
            fleet.close()
        health = client.get("/health").status
    return [
        _offered(rounds, shots, settings, cores),
        _goodput(rounds, settings),
        _refusals(shots),
        _nothing_else(shots, lost, health),
    ]


@contextmanager
def _server(context: SuiteContext, settings: OverloadSettings) -> Iterator[tuple[str, Cores | None]]:
    """Its address, and who runs where; ``None`` for a server that is not ours to place. The block is the clients'."""
    if context.url is not None:
        yield context.url, None
        return
    cores = divide(frozenset(os.sched_getaffinity(0)))
    layout = ("--sid", context.sid) if context.sid else ()
    pool = () if hardware.has_gpu() else ("--kv-pool-tokens", "65536")
    started = flashrec_server(
        context.model_path,
        sid_vocab_file=context.sid_vocab_file,
        arguments=(*layout, *pool, "--max-in-flight", str(settings.places)),
        log_dir=context.out_dir,
    )
    with ExitStack() as stack:
        with kept_to(cores.server):
            server = stack.enter_context(started)
        with kept_to(cores.clients):
            yield server.url, cores


def _places(client: Client, settings: OverloadSettings) -> int:
    """How many requests fill the server without one being refused."""
    reply = client.get("/server_info")
    info: dict[str, Any] = orjson.loads(reply.content) if reply.status == 200 else {}
    return min(int(info.get("server", {}).get("max_in_flight", settings.places)), THREADS * settings.clients)


def _rounds(
    fleet: Fleet, places: int, settings: OverloadSettings, seed: int, *, shared: bool = False
) -> tuple[list[Round], list[Shot], list[str]]:
    """The rounds up to the look that decides, every shot under overload that came back, and what became of the others.

    ``shared``: the clients run on the server's cores.
    """
    fleet.load(2 * places, places)
    pilot = steady_rate(fleet.load(4 * places, places).shots) or 1.0

    def capacity() -> tuple[float, float]:
        load = fleet.load(max(4 * places, round(pilot * settings.seconds)), places)
        return steady_rate(load.shots), load.cores

    rounds, overload, lost = list[Round](), list[Shot](), list[str]()
    for number in range(settings.rounds * settings.looks):
        before, usual_before = capacity()
        rate = settings.factor * (before or 1.0)
        load = fleet.load(max(2 * places, round(2 * rate * settings.seconds)), places, rate, seed + number)
        sent = sorted(shot.end - shot.seconds for shot in load.shots)
        offered = (len(sent) - 1) / (sent[-1] - sent[0])
        after, usual_after = capacity()
        taken = max(0.0, load.cores - (usual_before + usual_after) / 2) if shared else 0.0
        rounds.append(Round(before, offered, steady_rate(load.shots), after, taken))
        overload += load.shots
        lost += load.lost
        if len(rounds) % settings.rounds == 0 and _verdict(rounds, settings) is not Outcome.INCONCLUSIVE:
            break
    return rounds, overload, lost


def _verdict(rounds: Sequence[Round], settings: OverloadSettings) -> Outcome:
    return verdict([one.ratio for one in rounds], [one.ratio_at_most for one in rounds], settings.looks)


def _offered(
    rounds: Sequence[Round], shots: Sequence[Shot], settings: OverloadSettings, cores: Cores | None = None
) -> Check:
    reached = min(one.factor for one in rounds)
    refused = sum(shot.status == 503 for shot in shots)
    reasons = [f"only {reached:.2f} times the capacity was sent: use more --clients"] * (
        reached < 0.75 * settings.factor
    )
    reasons += ["nothing was refused"] * (refused == 0)
    return Check(
        SUITE,
        "the load was an overload",
        Outcome.INVALID if reasons else Outcome.PASS,
        f"{len(shots)} requests in {len(rounds)} rounds at {reached:.2f} times the capacity or more, n = {settings.n}, "
        f"{settings.clients} client process(es); {refused} refused; {cores or 'a server that was running already'}",
        reason="; ".join(reasons),
        data={"settings": asdict(settings)},
    )


def _goodput(rounds: Sequence[Round], settings: OverloadSettings) -> Check:
    ratios = [one.ratio for one in rounds]
    low, high = interval(ratios, settings.looks)
    outcome = _verdict(rounds, settings)
    at = f"look {len(rounds) // settings.rounds} of at most {settings.looks}"
    reason = f"goodput is {low:.3f} to {high:.3f} of the capacity"
    if any(one.taken for one in rounds):
        at_most = interval([one.ratio_at_most for one in rounds], settings.looks)[1]
        taken = statistics.median(one.taken for one in rounds)
        reason += f", at most {at_most:.3f} had its clients not taken {taken:.2f} of its cores"
    if outcome is Outcome.INCONCLUSIVE:
        reason += f": run more --rounds, longer --seconds, or on {ENOUGH} quiet cores or more"
    numbers = list(range(len(rounds)))
    return Check(
        SUITE,
        f"goodput at {settings.factor:g} times the capacity",
        outcome,
        f"{statistics.median(ratios):.3f} of the capacity (median of {len(rounds)} rounds, {at}; "
        f"{1 - ERROR / settings.looks:.2%} interval of the mean {low:.3f} to {high:.3f}, wanted from {KEPT:g} on); "
        f"capacity {statistics.median(one.capacity_before for one in rounds):.4g} req/s",
        reason="" if outcome is Outcome.PASS else reason,
        rows=[
            {"round": number + 1, **{name: round(value, 2) for name, value in asdict(one).items()}, "ratio": one.ratio}
            for number, one in enumerate(rounds)
        ],
        data={"ratios": ratios},
        printed=True,
        plots=[
            Plot(
                title="requests per second",
                x_label="round",
                y_label="requests/s",
                series=[
                    Series("offered", numbers, [one.offered for one in rounds]),
                    Series("goodput", numbers, [one.goodput for one in rounds]),
                    Series("capacity before", numbers, [one.capacity_before for one in rounds]),
                ],
                x_ticks=[str(number + 1) for number in numbers],
            )
        ],
    )


def _refusals(shots: Sequence[Shot]) -> Check:
    """A refusal is worth something only if it comes long before an answer would."""
    refused = [1e3 * shot.seconds for shot in shots if shot.status == 503]
    served = [1e3 * shot.seconds for shot in shots if shot.status == 200]
    name = "refusals are quick"
    if not refused or not served:
        return Check(SUITE, name, Outcome.NOT_RUN, "", reason="nothing was refused, or nothing served")
    p99, usual = percentile(refused, 99), percentile(served, 50)
    return Check(
        SUITE,
        name,
        Outcome.PASS if p99 <= usual / 2 else Outcome.FAIL,
        f"a 503 takes {percentile(refused, 50):.1f} ms (p50), {p99:.1f} ms (p99); an answer {usual:.0f} ms (p50), "
        f"{percentile(served, 99):.0f} ms (p99)",
        reason="" if p99 <= usual / 2 else "a 503 takes more than half as long as an answer",
        data={"refused_p99_ms": p99, "served_p50_ms": usual},
    )


def _nothing_else(shots: Sequence[Shot], lost: Sequence[str], health: int) -> Check:
    statuses = Counter(shot.status for shot in shots)
    strange = {status: count for status, count in statuses.items() if status not in (200, 503)}
    bad = [f"other statuses {strange}"] if strange else []
    bad += [f"{len(lost)} requests without an answer, the first: {lost[0]}"] if lost else []
    bad += [f"/health answers {health}"] if health != 200 else []
    return Check(
        SUITE,
        "nothing but answers and 503",
        Outcome.FAIL if bad else Outcome.PASS,
        f"statuses {dict(sorted(statuses.items()))}, {len(lost)} without an answer; /health afterwards {health}",
        reason="; ".join(bad),
    )
