"""Who overtakes whom, and for how long, on a simulated clock: a wave takes a second, whatever is in it."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
import pytest
import torch

from flashrec.kvcache.pool import KVPool
from flashrec.kvcache.radix import RadixCache
from flashrec.request import Request, ScoreSpace
from flashrec.runtime.admission import LOOKAHEAD, Admission
from flashrec.runtime.buffers import Bucket
from flashrec.runtime.member import Member, WaveKey

ROWS, REQUESTS, PAGE = 64, 8, 4
DELAY_S = 5.0
SID = WaveKey(True, ScoreSpace.SID, 3)
LEVEL = WaveKey(True, ScoreSpace.LEVEL, 3)


def make_admission(delay_s: float = DELAY_S) -> Admission:
    """64 rows and 8 requests a wave, and more pages than any test needs."""
    pool = KVPool.allocate(
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        num_pages=20_000,
        page_size=PAGE,
        beam_slots=ROWS * 3,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    bucket = Bucket(ROWS, REQUESTS)
    return Admission(RadixCache(pool), [bucket], max_filter_keys=10, max_head_delay=delay_s)


def member(width: int = 8, *, key: WaveKey = SID, prefix: int = 0, name: int = 0) -> Member:
    """``prefix`` pages of a prompt that all share, then a page of its own."""
    tokens = np.array([7] * prefix * PAGE + [name + 100] * (PAGE + 1), dtype=np.int32)
    return Member(Request(input_ids=tuple(tokens.tolist()), n=width), tokens, width, key, (), None)


def cache_prefix(admission: Admission, pages: int) -> None:
    """Serve a prompt once that begins with ``pages`` shared pages."""
    (one,) = admission.admit([member(1, prefix=pages)])
    admission.keep([one])
    admission.finish([one])


def simulate(admission: Admission, arrivals: Iterable[tuple[float, Member]]) -> dict[Member, float]:
    """When each request's wave starts. Nothing stays cached but what was before."""
    pending = sorted(arrivals, key=lambda entry: entry[0])
    waiting: list[Member] = []
    starts: dict[Member, float] = {}
    now = 0.0
    while pending or waiting:
        while pending and pending[0][0] <= now:
            arrived, one = pending.pop(0)
            admission.enqueue(one, arrived)
            waiting.append(one)
        if not waiting:
            now = pending[0][0]
            continue
        wave = admission.admit(waiting, now)
        assert wave
        starts |= dict.fromkeys(wave, now)
        waiting = [one for one in waiting if one not in starts]
        admission.finish(wave)
        now += 1.0
    return starts


def test_cached_prefixes_overtake_a_stranger_no_longer_than_the_delay() -> None:
    """40 requests wait before the stranger; each second a wave's worth arrives whose prompts are cached."""
    stranger = member()
    arrivals = [(0.0, member(name=index)) for index in range(40)] + [(0.6, stranger)]
    arrivals += [(1.0 + index / 8, member(prefix=6, name=index)) for index in range(8 * 60)]

    def start(delay_s: float) -> float:
        admission = make_admission(delay_s)
        cache_prefix(admission, 6)
        return simulate(admission, arrivals)[stranger]

    assert start(DELAY_S) <= 0.6 + DELAY_S + 40 / REQUESTS + 1
    assert start(1000.0) > 20


@pytest.mark.parametrize("seed", range(8))
def test_nobody_who_arrives_later_than_the_delay_overtakes(seed: int) -> None:
    """Requests of one width and key, random arrivals above capacity, random cached prefixes."""
    rng = random.Random(seed)
    admission = make_admission()
    cache_prefix(admission, 9)
    arrivals = [(rng.uniform(0, 12), member(8, prefix=rng.randrange(10), name=index)) for index in range(150)]
    starts = simulate(admission, arrivals)
    overtaken = [
        later - earlier
        for earlier, old in arrivals
        for later, new in arrivals
        if later > earlier and starts[new] < starts[old]
    ]
    assert overtaken, "no request overtook another: the test sees nothing"
    assert max(overtaken) < DELAY_S


def test_a_narrow_request_does_not_wait_for_a_queue_of_wide_ones() -> None:
    wide = [(0.0, member(ROWS, name=index)) for index in range(20)]
    narrow = member(1)
    starts = simulate(make_admission(), [*wide, (0.5, narrow)])
    assert starts[narrow] == 1.0
    strict = simulate(make_admission(delay_s=0.0), [*wide, (0.5, narrow)])
    assert strict[narrow] == 20.0


def test_a_wide_request_is_passed_by_what_arrives_within_the_delay_and_no_other() -> None:
    """Narrow ones fill every wave for 40 seconds; their rows would leave no room for the wide one in any of them."""
    wide = member(ROWS)
    narrow = [(index / 8, member(8, name=index)) for index in range(8 * 40)]
    starts = simulate(make_admission(), [(0.05, wide), *narrow])
    passed = [arrived for arrived, one in narrow if starts[one] < starts[wide]]
    assert len(passed) >= 8
    assert max(passed) < 0.05 + DELAY_S
    assert starts[wide] <= 0.05 + DELAY_S + 2


def test_keys_take_turns_by_their_oldest_request() -> None:
    lonely = member(key=LEVEL)
    flood = [(index / 16, member(name=index)) for index in range(16 * 30)]
    starts = simulate(make_admission(), [(3.01, lonely), *flood])
    before = [arrived for arrived, one in flood if starts[one] < starts[lonely]]
    assert max(before) <= 3.01 + 1, "only its own second's arrivals may ride along with older ones"
    assert all(starts[one] < starts[lonely] for arrived, one in flood if arrived < 3.0)


def test_requests_without_a_queue_go_in_their_order() -> None:
    wave = make_admission().admit([member(60), member(8), member(4), member(1)])
    assert [one.width for one in wave] == [60, 4]


def test_a_long_queue_does_not_cost_a_look_up_each(monkeypatch: pytest.MonkeyPatch) -> None:
    admission = make_admission()
    looked_up = []
    real = admission.cache.match
    monkeypatch.setattr(admission.cache, "match", lambda tokens: looked_up.append(1) or real(tokens))
    wave = admission.admit([member(name=index) for index in range(1000)])
    assert len(wave) == REQUESTS
    assert len(looked_up) <= LOOKAHEAD * REQUESTS + REQUESTS


@pytest.mark.parametrize(
    ("waiting", "in_flight", "next_wave"),
    [
        (7, 1, 4),  # 1 and 7 become 4 and 4
        (4, 4, 4),
        (8, 3, 6),
        (3, 5, 3),
        (1, 7, 1),
        (6, 1, 6),  # below 8 in all a smaller wave saves no time
        (8, 0, 8),  # the device has nothing to do meanwhile
        (8, 20, 8),
    ],
)
def test_behind_a_wave_in_flight_the_next_takes_half_of_all(waiting: int, in_flight: int, next_wave: int) -> None:
    queue = [member(1, name=index) for index in range(waiting)]
    assert make_admission().admit(queue, in_flight=in_flight) == queue[:next_wave]
