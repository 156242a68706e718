"""Token sequences to train on: a chat prompt with the history, the answer, and where the loss counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Frame:
    """The fixed tokens around the semantic IDs of a prompt and its answer.

    ``before`` starts the prompt, ``after`` ends it, ``eos`` ends the answer. Added tokens cut the text for the
    BPE, so joining these pieces gives exactly the tokens of the whole text.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    eos: int


@dataclass(frozen=True, slots=True)
class Batch:
    """``input_ids`` int64 ``[rows, length]``, padded on the right; ``targets`` the next ids, -100 where no loss."""

    input_ids: torch.Tensor
    targets: torch.Tensor


class ExampleMaker:
    """Turns item sequences into batches.

    ``item_tokens``: int64 ``[num_items, depth + 2]``, the begin token, the code tokens and the end token of each
    item. Sequences are arrays of row numbers of it, oldest first; the last one becomes the answer. Every code
    and end token counts in the loss, the history's too (it asks the same question of a shorter history), as do
    the answer's begin token and ``eos``.
    """

    def __init__(self, item_tokens: Ints, frame: Frame, *, pad: int, max_history: int) -> None:
        self._items = item_tokens
        self._frame = frame
        self._pad = pad
        self.max_history = max_history

    def encode(self, sequence: Sequence[int] | Ints) -> tuple[list[int], list[bool]]:
        """Token ids of one example, and which of them count as targets."""
        history, answer = sequence[:-1], sequence[-1]
        width = self._items.shape[1]
        item_counts = [False] + [True] * (width - 1)
        ids = [*self._frame.before, *self._items[history].ravel().tolist(), *self._frame.after]
        counts = [False] * len(self._frame.before) + item_counts * len(history) + [False] * len(self._frame.after)
        return [*ids, *self._items[answer].tolist(), self._frame.eos], [*counts, *([True] * (width + 1))]

    def collate(self, sequences: Sequence[Sequence[int] | Ints]) -> Batch:
        """A padded batch of examples."""
        encoded = [self.encode(sequence) for sequence in sequences]
        longest = max(len(ids) for ids, _ in encoded)
        ids = np.full((len(encoded), longest), self._pad, np.int64)
        targets = np.full((len(encoded), longest), -100, np.int64)
        for row, (tokens, counts) in enumerate(encoded):
            ids[row, : len(tokens)] = tokens
            targets[row, : len(tokens)] = np.where(counts, tokens, -100)
        return Batch(torch.from_numpy(ids[:, :-1].copy()), torch.from_numpy(targets[:, 1:].copy()))


def epoch_batches(
    sequences: Sequence[Ints], maker: ExampleMaker, *, batch_size: int, shuffle_history: float, seed: int, epoch: int
) -> Iterator[Batch]:
    """The batches of one epoch: a function of the arguments alone, so that training can resume anywhere.

    Long sequences are cut to a random window. With probability ``shuffle_history`` the order of a history is
    forgotten. Neighbouring lengths share a batch, which saves padding.
    """
    rng = np.random.default_rng([seed, epoch])
    windows = [_window(sequence, maker.max_history + 1, shuffle_history, rng) for sequence in sequences]
    order = rng.permutation(len(windows))
    pool = 32 * batch_size
    batches: list[Ints] = []
    for start in range(0, len(order), pool):
        chunk = order[start : start + pool]
        chunk = chunk[np.argsort([len(windows[i]) for i in chunk], kind="stable")]
        batches += [chunk[i : i + batch_size] for i in range(0, len(chunk), batch_size)]
    for index in rng.permutation(len(batches)):
        yield maker.collate([windows[i] for i in batches[index]])


def _window(sequence: Ints, size: int, shuffle_history: float, rng: np.random.Generator) -> Ints:
    start = int(rng.integers(max(len(sequence) - size, 0) + 1))
    window = sequence[start : start + size]
    if rng.random() < shuffle_history:
        return np.concatenate([rng.permutation(window[:-1]), window[-1:]])
    return window
