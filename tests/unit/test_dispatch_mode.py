"""The decode program reads no tensor on the host: what would stop a graph capture is refused on a CPU already."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engine import ask, open_engine, write_shop
from torch.utils._python_dispatch import TorchDispatchMode

from flashrec import Engine, Request, ScoreSpace
from flashrec.runtime.stage import DecodeStage

HOST_READS = (
    "aten._local_scalar_dense",
    "aten.is_nonzero",
    "aten.item",
    "aten.masked_select",
    "aten.nonzero",
    "aten.unique",
)
INDEXING = ("aten.index.", "aten.index_put")
"""By a bool mask, these count its true entries first."""


class HostReadError(AssertionError):
    """An operation whose result's value or shape the host must wait for."""


class NoHostReads(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if str(func).startswith(HOST_READS) or (str(func).startswith(INDEXING) and _by_mask(args[1])):
            raise HostReadError(f"{func} in the decode program")
        return func(*args, **(kwargs or {}))


def _by_mask(indices: Sequence[torch.Tensor | None]) -> bool:
    return any(index is not None and index.dtype is torch.bool for index in indices)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shop(tmp_path_factory.mktemp("shop"))


@pytest.fixture(scope="module")
def engine(shop: Path) -> Iterator[Engine]:
    engine = open_engine(shop, record_ledger=True)
    yield engine
    engine.close()


@pytest.fixture
def guarded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Every decode program runs under the guard, from the head's input to the final frontier."""
    real = DecodeStage._eager

    def eager(*arguments: Any) -> torch.Tensor:
        with NoHostReads():
            return real(*arguments)

    monkeypatch.setattr(DecodeStage, "_eager", eager)
    return engine


def waves(engine: Engine) -> dict[str, list[Request]]:
    assert engine.catalog is not None
    sids = tuple(tuple(codes) for codes in engine.catalog.sids[:9].tolist())
    mates = [ask(4, seed=1, n=9), ask(13, seed=2, n=1)]
    return {
        **{space.value: [ask(6, n=5, score_space=space)] for space in ScoreSpace},
        "mixed": [*mates, ask(6, n=5)],
        "allow": [*mates, ask(6, n=5, allow_sids=sids)],
        "exclude": [*mates, ask(6, n=5, exclude_sids=sids)],
        "sampled": [*mates, ask(6, n=5, temperature=0.7, seed=3)],
    }


@pytest.mark.parametrize("kind", [*(space.value for space in ScoreSpace), "mixed", "allow", "exclude", "sampled"])
@pytest.mark.parametrize("dense", [True, False], ids=["dense", "csr"])
def test_no_decode_program_waits_for_the_device(kind: str, dense: bool, guarded: Engine, shop: Path) -> None:
    wave = waves(guarded)[kind]
    if dense:
        assert all(result.beams for result in guarded.generate(wave))
        return
    sparse = open_engine(shop, dense_trie_cells=0)
    try:
        assert all(result.beams for result in sparse.generate(wave))
    finally:
        sparse.close()


@pytest.mark.parametrize(
    "read",
    [
        lambda logits: float(logits[0, 0]),
        lambda logits: logits[0].nonzero(),
        lambda logits: logits[logits > 0],
        lambda logits: bool((logits > 0).any()),
        lambda logits: logits.max().item(),
    ],
    ids=["float", "nonzero", "mask", "bool", "item"],
)
def test_a_planted_host_read_is_refused(guarded: Engine, read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: one read in the selection, and the guard fires."""
    program = guarded.stage.program(guarded.prepare(ask(6, n=5)).key)
    real = program.expand

    def reading(logits: torch.Tensor, *arguments: Any) -> Any:
        read(logits)
        return real(logits, *arguments)

    monkeypatch.setattr(program, "expand", reading)
    with pytest.raises(HostReadError):
        guarded.generate([ask(6, n=5)])
    assert guarded.stats()["free_pages"] + guarded.stats()["cached_pages"] == guarded.stats()["usable_pages"]
