"""Named tensors in one allocation: each write replaces all of them, and all begin where a kernel likes it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashrec.transfer import StaticBlock

SHAPES = st.dictionaries(
    st.sampled_from("abcdef"), st.one_of(st.tuples(st.integers(0, 9)), st.tuples(st.integers(1, 3), st.integers(1, 9)))
)


@given(SHAPES.filter(bool), st.data())
def test_nothing_of_the_write_before_is_left(shapes: dict[str, tuple[int, ...]], data: st.DataObject) -> None:
    block = StaticBlock(shapes, torch.device("cpu"), fill=-1)
    for turn in range(3):
        fields = {}
        for name in data.draw(st.lists(st.sampled_from(sorted(shapes)), unique=True)):
            part = tuple(data.draw(st.integers(0, size)) for size in shapes[name])
            fields[name] = np.full(part, 10 * turn, dtype=np.int32)
        for _ in range(data.draw(st.integers(0, 2))):
            block.prepare()
        block.write(fields)
        for name, shape in shapes.items():
            wanted = np.full(shape, -1, dtype=np.int32)
            if name in fields:
                wanted[tuple(map(slice, fields[name].shape))] = 10 * turn
            assert block[name].tolist() == wanted.tolist()


@given(SHAPES.filter(bool))
def test_fields_begin_at_multiples_of_64_bytes_and_do_not_overlap(shapes: dict[str, tuple[int, ...]]) -> None:
    block = StaticBlock(shapes, torch.device("cpu"))
    fields = [block[name] for name in shapes]
    base = min(field.data_ptr() for field in fields if field.numel()) if any(f.numel() for f in fields) else 0
    places = [range(field.data_ptr() - base, field.data_ptr() - base + 4 * field.numel()) for field in fields]
    used = [place for place in places if place]
    assert all(place.start % 64 == 0 for place in used)
    assert all(before.stop <= after.start for before, after in itertools.pairwise(used))


def test_a_buffer_is_written_to_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy from it may still be under way when the next write comes, or the next one is prepared."""
    made: list[torch.Tensor] = []
    real = torch.empty

    def empty(size: int, **options: Any) -> torch.Tensor:
        made.append(real(size, **options))
        return made[-1]

    block = StaticBlock({"a": (4,)}, torch.device("cpu"))
    monkeypatch.setattr(torch, "empty", empty)
    for turn, (prepared, buffers) in enumerate(((False, 1), (True, 2), (True, 3), (False, 4))):
        if prepared:
            block.prepare()
        block.write({"a": np.array([turn])})
        block.prepare()
        assert len(made) == buffers + 1
        assert [buffer[0].item() for buffer in made] == [*range(turn + 1), 0]


def test_values_that_do_not_fit_a_field_are_refused_and_leave_nothing() -> None:
    block = StaticBlock({"a": (2, 3), "b": (4,)}, torch.device("cpu"))
    with pytest.raises(ValueError, match="broadcast"):
        block.write({"b": np.ones(4), "a": np.ones((3, 3))})
    block.write({"a": np.full((1, 2), 7)})
    assert block["a"].tolist() == [[7, 7, 0], [0, 0, 0]]
    assert block["b"].tolist() == [0, 0, 0, 0]
