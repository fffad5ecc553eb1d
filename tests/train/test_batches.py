"""Global batches: a function of seed and position alone."""

from pathlib import Path

import numpy as np
import pytest

from hyperparallel.errors import DataError
from hyperparallel.train.batches import Batches
from hyperparallel.train.tokens import TokenFile

pytestmark = pytest.mark.fake


def tokens(count: int) -> TokenFile:
    return TokenFile(Path("memory"), np.arange(count, dtype=np.uint16), count, "")


def test_an_epoch_shows_every_window_once_in_shuffled_order() -> None:
    batches = Batches(tokens(103), batch_size=4, seq_len=5, seed=1)
    rows = [row.tolist() for i in range(5) for row in batches.batch(i)["input_ids"]]
    assert sorted(rows) == [list(range(5 * i, 5 * i + 5)) for i in range(20)]
    assert rows != sorted(rows)
    labels = batches.batch(0)["labels"]
    assert labels.tolist() == batches.batch(0)["input_ids"].tolist()
    assert labels.data_ptr() != batches.batch(0)["input_ids"].data_ptr()


@pytest.mark.parametrize("batch_size", [1, 3, 7, 25])
def test_rows_depend_on_seed_and_number_not_on_the_batch_size(batch_size: int) -> None:
    one = Batches(tokens(50), batch_size=1, seq_len=5, seed=3)
    many = Batches(tokens(50), batch_size=batch_size, seq_len=5, seed=3)
    for i in range(3):
        for row in range(batch_size):
            expected = one.batch(i * batch_size + row)["input_ids"][0]
            assert many.batch(i)["input_ids"][row].tolist() == expected.tolist()


def test_epochs_and_seeds_differ() -> None:
    def epoch(seed: int, number: int) -> list[int]:
        batch = Batches(tokens(100), batch_size=20, seq_len=5, seed=seed).batch(number)
        return [int(row[0]) for row in batch["input_ids"]]

    orders = [epoch(0, 0), epoch(0, 1), epoch(1, 0)]
    assert len({tuple(order) for order in orders}) == 3
    assert all(sorted(order) == list(range(0, 100, 5)) for order in orders)


def test_position_is_the_whole_state() -> None:
    first = Batches(tokens(60), batch_size=5, seq_len=4, seed=2)
    whole = [next(first)["input_ids"].tolist() for _ in range(9)]
    resumed = Batches(tokens(60), batch_size=5, seq_len=4, seed=2, position=4)
    assert [next(resumed)["input_ids"].tolist() for _ in range(5)] == whole[4:]


def test_too_little_data_and_bad_sizes() -> None:
    with pytest.raises(DataError, match=r"3 tokens.*at least seq_len = 4"):
        Batches(tokens(3), batch_size=1, seq_len=4)
    with pytest.raises(DataError, match="batch_size"):
        Batches(tokens(30), batch_size=0, seq_len=4)
    with pytest.raises(DataError, match="seq_len"):
        Batches(tokens(30), batch_size=1, seq_len=0)
