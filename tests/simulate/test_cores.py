"""Threads on cores: who has a core when, and what a rank's clock would show."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from hyperparallel.errors import PlanError
from hyperparallel.simulate.cores import run_threads
from hyperparallel.workload.instruction import Instruction

pytestmark = pytest.mark.pure


@dataclass(frozen=True)
class Prices:
    """An op takes its flops in seconds; a collective 1 s to start and 2 s to fetch."""

    cores: int = 1
    slice_s: float = 1.0

    def op(self, one: Instruction) -> float:
        return one.flops

    def transfer(self, start: Instruction, members: int) -> tuple[float, float]:
        return 1.0, float(members)


def everybody(rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
    return (0, 1)


def work(*seconds: float) -> list[Instruction]:
    return [Instruction(f"op_{i}", "matmul", flops=one) for i, one in enumerate(seconds)]


def talk(before: float) -> list[Instruction]:
    return [
        Instruction("mm", "matmul", flops=before),
        Instruction("all_reduce_start", "all_reduce", "start", (0,), axes=("tp",)),
        Instruction("wait", "wait", "wait", (1,), makes=(("y", 16.0),), last_reads=(("x", 8.0),)),
        Instruction("add", "elementwise", needs=(2,), flops=1.0),
    ]


@pytest.mark.parametrize(("ranks", "cores"), [(1, 1), (4, 2), (4, 4), (6, 3), (2, 8)])
def test_equal_threads_share_the_cores(ranks: int, cores: int) -> None:
    """A closed form: all the work over all cores that can be used."""
    programs = {rank: work(3.0, 5.0) for rank in range(ranks)}
    found = run_threads(programs, Prices(cores, slice_s=0.01), everybody)
    assert found.step_seconds == pytest.approx(8.0 * ranks / min(ranks, cores), rel=0.01)
    assert found.busy_share == pytest.approx(1.0, rel=0.01)


def test_turns_last_a_slice() -> None:
    found = run_threads({0: work(1.5), 1: work(1.5)}, Prices(1, slice_s=1.0), everybody)
    assert [span.end for span in found.spans] == [2.5, 3.0]
    assert all(span.begin == 0.0 for span in found.spans)  # off the core or on it


def test_nobody_is_put_off_a_core_that_nobody_wants() -> None:
    found = run_threads({0: work(9.0), 1: work(9.0)}, Prices(2, slice_s=0.1), everybody)
    assert [span.end for span in found.spans] == [9.0, 9.0]


def test_a_rank_that_waits_frees_its_core() -> None:
    """Rank 0 computes 1 s, starts until 2 s and waits; rank 1 has the core from there."""
    found = run_threads({0: talk(1.0), 1: talk(4.0)}, Prices(1, slice_s=100.0), everybody)
    ends = {(span.rank, span.name): (span.begin, span.end) for span in found.spans}
    assert ends[0, "all_reduce_start"] == (1.0, 2.0)
    assert ends[1, "all_reduce_start"] == (6.0, 7.0)
    assert ends[1, "wait"] == (7.0, 9.0)  # rank 0 is awake from 7 s on, but has no core until rank 1 is done
    assert ends[0, "wait"] == (2.0, 12.0) and found.step_seconds == 13.0
    assert ends[0, "all_reduce"] == (1.0, 12.0)  # as it is measured: from its start to the end of its wait


def test_memory_of_a_collective_lives_until_its_wait() -> None:
    found = run_threads({0: talk(1.0), 1: talk(1.0)}, Prices(2), everybody)
    assert [(s.seconds, s.num_bytes) for s in found.memory[0]] == [(2.0, 16.0), (4.0, 8.0)]


def test_programs_that_wait_for_ever_are_refused() -> None:
    crossed = [
        Instruction("a_start", "all_reduce", "start", axes=("tp",)),
        Instruction("a_wait", "wait", "wait", (0,)),
    ]
    with pytest.raises(PlanError, match="programs of all ranks"):
        run_threads({0: crossed}, Prices(), everybody)
    with pytest.raises(PlanError, match="rank 1 with other collectives"):
        run_threads({0: crossed, 1: work(1.0)}, Prices(), everybody)
