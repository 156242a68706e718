"""Times every kernel at Qwen3-1.7B's shapes against its physical floor: ``python -m flashrec_harness.kernel_bench``.

The floor is the larger of bytes over bandwidth and operations over the matrix rate, with the ceilings measured on
an H200 (2026-11-29). Calls are timed from a captured graph that rotates operands which do not fit the L2 together.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from flashrec.attention.paged import takes_tall_tiles
from flashrec.errors import ConfigError
from flashrec.kernels.decode_work import decode_work
from flashrec.kernels.ops import Ops, select_ops
from flashrec.kernels.quantize import quant_per_token, quantize_weight
from flashrec.kernels.tiles import TALL_TILE_M, TILE_M, AttentionShape, RowTiles, row_tiles, rows_per_tile

BYTES_PER_US = 4.2e6
FP8_PER_US = 1.26e9
BF16_PER_US = 7.2e8
ATTENTION_PER_US = 6.0e8
HIDDEN, INTERMEDIATE, Q_HEADS, KV_HEADS, HEAD_DIM = 2048, 6144, 16, 8, 128
HEAD_ROWS = 24576
PAGE_SIZE = 64
ROTATED_BYTES = 2e8
WEIGHTS = {"qkv": (4096, 2048), "o": (2048, 2048), "gate_up": (12288, 2048), "down": (2048, 6144)}
DECODE_ROWS, PREFILL_ROWS = (16, 50, 128, 400, 1600, 4096), (303, 2465, 19720)
DECODE_SHAPES = ((1, 50, 2465), (8, 50, 2465), (32, 50, 2465), (32, 50, 303), (1, 512, 2465), (8, 512, 2465))
PREFILL_SHAPES = ((1, 303), (32, 303), (1, 2465), (8, 2465), (1, 5000))

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds a call, beside the floor of its bytes and operations."""

    kernel: str
    shape: str
    us: float
    floor_us: float

    def line(self) -> str:
        """One row of the printed table."""
        share = self.floor_us / self.us
        return f"{self.kernel:30} {self.shape:24} {self.us:9.1f} us {self.floor_us:9.1f} us {share:6.0%}"


def time_calls(calls: Sequence[Call], *, rounds: int = 7) -> float:
    """Median microseconds a call, from replays of one captured graph of all ``calls``."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    repeats = max(1, 8 // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    graph.replay()
    times: list[float] = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / (repeats * len(calls)))
    return statistics.median(times)


def _copies(bytes_each: float) -> int:
    return int(min(16, max(1, ROTATED_BYTES // bytes_each)))


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def pointwise(ops: Ops) -> Iterator[Timing]:
    """Norm, activation and the K/V store, by bytes."""
    weight = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)
    for rows in (50, 400, *PREFILL_ROWS[1:]):
        xs = [_normal(2, rows, HIDDEN) for _ in range(_copies(rows * HIDDEN * 4))]
        us = time_calls([partial(ops.add_rms_norm_quant, *x, weight, 1e-6) for x in xs])
        yield Timing("add_rms_norm_quant", f"{rows} x {HIDDEN}", us, rows * HIDDEN * 7 / BYTES_PER_US)
        gates = [_normal(rows, 2 * INTERMEDIATE) for _ in range(_copies(rows * INTERMEDIATE * 4))]
        us = time_calls([partial(ops.silu_mul_quant, gate_up) for gate_up in gates])
        yield Timing("silu_mul_quant", f"{rows} x {INTERMEDIATE}", us, rows * INTERMEDIATE * 5 / BYTES_PER_US)
        yield _store(ops, rows)


def _store(ops: Ops, rows: int) -> Timing:
    width = (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM
    slots = torch.arange(rows, device="cuda", dtype=torch.int32)
    gain = torch.ones(HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    k, v = _normal(2, rows, KV_HEADS, HEAD_DIM)
    table = torch.randn(8192, HEAD_DIM, device="cuda")
    place = (slots % 2465, slots, gain, gain, 1e-6, table, k, v, 1.0, 1.0, Q_HEADS, KV_HEADS, HEAD_DIM)
    calls = [partial(ops.qk_norm_rope_store, _normal(rows, width), *place) for _ in range(_copies(rows * width * 2))]
    return Timing("qk_norm_rope_store", f"{rows} tokens", time_calls(calls), rows * width * 4 / BYTES_PER_US)


def products(ops: Ops) -> Iterator[Timing]:
    """FP8 products of a layer on the decode and the prefill path, and the bf16 head."""
    for name, (outs, size) in WEIGHTS.items():
        weights = [quantize_weight(_normal(outs, size)) for _ in range(_copies(outs * size))]
        for rows in (*DECODE_ROWS, *PREFILL_ROWS):
            x = quant_per_token(_normal(rows, size))
            us = time_calls([partial(ops.linear_fp8, *x, *w, torch.bfloat16) for w in weights])
            floor = max(outs * size / BYTES_PER_US, 2 * rows * outs * size / FP8_PER_US)
            yield Timing("linear_fp8", f"{name}, M {rows}", us, floor)
    heads = [_normal(HEAD_ROWS, HIDDEN) for _ in range(2)]
    for rows in DECODE_ROWS:
        x_plain = _normal(rows, HIDDEN)
        us = time_calls([partial(ops.linear, x_plain, w) for w in heads])
        floor = HEAD_ROWS * HIDDEN * max(2 / BYTES_PER_US, 2 * rows / BF16_PER_US)
        yield Timing("linear", f"head, M {rows}", us, floor)


def _pool(requests: int, context: int, beam_slots: int) -> tuple[torch.Tensor, int, torch.Tensor, torch.Tensor]:
    """Page table, first beam slot, K and V."""
    pages = -(-context // PAGE_SIZE)
    table = torch.randperm(requests * pages, device="cuda").reshape(requests, pages).int() + 1
    base = (requests * pages + 1) * PAGE_SIZE
    k, v = _normal(2, base + beam_slots, KV_HEADS, HEAD_DIM)
    return table, base, k, v


def _tiles(rows: Sequence[int], tile: int) -> RowTiles:
    return RowTiles(*(part.cuda() for part in row_tiles(rows, tile)))


def decode_attention(ops: Ops) -> Iterator[Timing]:
    """Beams over their shared context, two own tokens each."""
    tile = rows_per_tile(Q_HEADS, KV_HEADS)
    for requests, n, context in DECODE_SHAPES:
        rows = requests * n
        table, base, k, v = _pool(requests, context, 3 * rows)
        lengths = torch.full((requests,), context, device="cuda", dtype=torch.int32)
        ancestors = torch.randint(0, rows, (3, rows), device="cuda", dtype=torch.int32)
        q = _normal(rows, Q_HEADS, HEAD_DIM)
        work = decode_work([n] * requests, [context] * requests, tile, KV_HEADS, device=q.device)
        place = (work, tile, base, rows, 2, ancestors, HEAD_DIM**-0.5, 1.0, 1.0)
        us = time_calls([partial(ops.shared_prefix_attention, q, k, v, table, PAGE_SIZE, lengths, *place)])
        operations = 4 * rows * context * Q_HEADS * HEAD_DIM
        kv_bytes = requests * context * 4 * KV_HEADS * HEAD_DIM
        floor = max(operations / ATTENTION_PER_US, kv_bytes / BYTES_PER_US)
        yield Timing("shared_prefix_attention", f"{requests} x {n} over {context}", us, floor)


def prefill_attention(ops: Ops) -> Iterator[Timing]:
    """Causal attention of whole prompts, cut as the engine cuts them."""
    for requests, context in PREFILL_SHAPES:
        tall = takes_tall_tiles(ops, requests * context, context)
        tile = rows_per_tile(Q_HEADS, KV_HEADS, TALL_TILE_M if tall else TILE_M)
        table, _, k, v = _pool(requests, context, 0)
        lengths = torch.full((requests,), context, device="cuda", dtype=torch.int32)
        positions = torch.arange(context, device="cuda", dtype=torch.int32).repeat(requests)
        place = (lengths, positions, _tiles([context] * requests, tile), tile, HEAD_DIM**-0.5, 1.0, 1.0)
        q = _normal(requests * context, Q_HEADS, HEAD_DIM)
        us = time_calls([partial(ops.paged_prefill_attention, q, k, v, table, PAGE_SIZE, *place)])
        floor = 2 * requests * context**2 * Q_HEADS * HEAD_DIM / ATTENTION_PER_US
        yield Timing("paged_prefill_attention", f"{requests} x {context}", us, floor)


def measure() -> list[Timing]:
    """The whole menu. Raises :class:`ConfigError` without a GPU."""
    if not torch.cuda.is_available():
        raise ConfigError("kernel bench: no GPU on this machine; a CPU has nothing to time here")
    shape = AttentionShape(Q_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, torch.bfloat16)
    ops = select_ops(torch.device("cuda"), torch.bfloat16, "fp8", attention=shape)
    return [timing for part in (pointwise, products, decode_attention, prefill_attention) for timing in part(ops)]


def main() -> None:
    """Prints the table and, with ``--json FILE``, writes it."""
    parser = argparse.ArgumentParser(description=measure.__doc__)
    parser.add_argument("--json", type=Path, help="write the timings here")
    arguments = parser.parse_args()
    timings = measure()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: kernel, shape, time, floor, floor/time")
    for timing in timings:
        print(timing.line())
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(timing) for timing in timings], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
