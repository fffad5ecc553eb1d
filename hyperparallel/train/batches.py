"""Global batches by number: the same for every rank count, plan and restart.

Batch `i` holds windows `i * B ... i * B + B - 1` of an endless list: the token file is cut in
windows of `S` tokens, and each pass over them (an epoch) is shuffled by a permutation that depends
on the seed and the epoch only. So the position in the data is one number, and a resumed run sees
exactly what an uninterrupted one would. Every rank reads the whole *global* batch [B, S]; cutting
it to the rank's part is the business of the program that runs it, as the plan says.

Labels equal the inputs: causal models shift them by one inside their loss.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from hyperparallel.errors import DataError
from hyperparallel.train.tokens import TokenFile


@dataclass
class Batches:
    """An endless, resumable iterator of global batches; `position` is its whole state."""

    tokens: TokenFile
    batch_size: int
    seq_len: int
    seed: int = 0
    position: int = 0
    _epoch: int = field(default=-1, init=False, repr=False)
    _order: npt.NDArray[np.int64] = field(
        default_factory=lambda: np.empty(0, np.int64), init=False, repr=False
    )

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise DataError("batch_size", self.batch_size, "1 or more")
        if self.seq_len < 1:
            raise DataError("seq_len", self.seq_len, "1 or more")
        if self.num_windows == 0:
            given = f"{self.tokens.path} with {len(self.tokens)} tokens"
            raise DataError("data", given, f"at least seq_len = {self.seq_len} tokens")

    @property
    def num_windows(self) -> int:
        """Windows in one epoch; tokens after the last whole window are left out."""
        return len(self.tokens) // self.seq_len

    def batch(self, index: int) -> dict[str, torch.Tensor]:
        """Global batch `index` (0, 1, ...): `input_ids` and `labels`, int64 [B, S]."""
        first = index * self.batch_size
        rows = np.stack([self._window(first + row) for row in range(self.batch_size)])
        input_ids = torch.from_numpy(rows)
        return {"input_ids": input_ids, "labels": input_ids.clone()}

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        batch = self.batch(self.position)
        self.position += 1
        return batch

    def _window(self, number: int) -> npt.NDArray[np.int64]:
        epoch, index = divmod(number, self.num_windows)
        if epoch != self._epoch:
            # RandomState's stream is frozen by numpy's policy (NEP 19); Generator's is not.
            bits = np.random.MT19937(np.random.SeedSequence([self.seed, epoch]))
            self._order = np.random.RandomState(bits).permutation(self.num_windows)
            self._epoch = epoch
        start = int(self._order[index]) * self.seq_len
        # int64 for embeddings; it also copies, out of the read-only mapping.
        return np.asarray(self.tokens.ids[start : start + self.seq_len], dtype=np.int64)
