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
    """An op takes its flops in seconds; a collective 1 s to start and 2 s to fetch; a copy 1 s and one for
    every 4 bytes."""

    cores: int = 1
    slice_s: float = 1.0

    def op(self, one: Instruction) -> float:
        return one.flops

    def transfer(self, start: Instruction, members: int) -> tuple[float, float]:
        return 1.0, float(members)

    def copy(self, one: Instruction) -> float:
        return 1.0 + one.num_bytes / 4.0


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


def fetch(name: str, num_bytes: float, stream: str = "copy.host.in") -> Instruction:
    return Instruction(name, "copy", "start", num_bytes=num_bytes, stream=stream)


def wait(start: int) -> Instruction:
    return Instruction(f"wait_{start}", "wait", "wait", (start,))


def ends(*programs: list[Instruction]) -> dict[tuple[int, str], float]:
    """When each instruction of rank 0, and of rank 1 on the same core, is through."""
    found = run_threads(dict(enumerate(programs)), Prices(1, 100.0), everybody)
    return {(span.rank, span.name): span.end for span in found.spans if span.stream == "compute"}


def test_a_copy_moves_beside_the_core() -> None:
    """Started at 1 s, 16 bytes are there at 1 + 1 + 16/4 = 6 s; what is done meanwhile hides them."""
    late = ends([fetch("f", 16.0), *work(2.0), wait(0)])
    assert late == {(0, "f"): 1.0, (0, "op_0"): 3.0, (0, "wait_0"): 7.0}  # 1 s of a wait is its core's
    hidden = ends([fetch("f", 16.0), *work(9.0), wait(0)])
    assert hidden == {(0, "f"): 1.0, (0, "op_0"): 10.0, (0, "wait_0"): 11.0}


def test_copies_of_one_stream_move_one_after_another() -> None:
    """2 s to start both. One stream: 1 + 5 = 6, then 6 + 3 = 9; two: 6 and 2 + 3 = 5."""
    both = [fetch("a", 16.0), fetch("b", 8.0), wait(1), wait(0)]
    assert ends(both) == {(0, "a"): 1.0, (0, "b"): 2.0, (0, "wait_1"): 10.0, (0, "wait_0"): 11.0}
    apart = [fetch("a", 16.0), fetch("b", 8.0, "copy.host.out"), wait(1), wait(0)]
    assert ends(apart) == {(0, "a"): 1.0, (0, "b"): 2.0, (0, "wait_1"): 6.0, (0, "wait_0"): 7.0}


def test_a_rank_that_waits_for_a_copy_frees_its_core() -> None:
    """Rank 0 starts until 1 s and sleeps until 6 s; rank 1 has the core from 1 s to 4 s, then nobody."""
    found = ends([fetch("f", 16.0), wait(0)], work(3.0))
    assert found == {(0, "f"): 1.0, (1, "op_0"): 4.0, (0, "wait_0"): 7.0}
    found = ends([fetch("f", 16.0), wait(0)], work(8.0))
    assert found == {(0, "f"): 1.0, (1, "op_0"): 9.0, (0, "wait_0"): 10.0}, "awake at 6 s, a core at 9 s"


def test_streams_of_different_ranks_do_not_queue() -> None:
    program = [fetch("f", 16.0), wait(0)]
    found = run_threads({0: program, 1: program}, Prices(2), everybody)
    assert [span.end for span in found.spans if span.name == "wait_0"] == [7.0, 7.0]
