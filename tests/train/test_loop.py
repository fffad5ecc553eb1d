"""The loop: a resumed run is the uninterrupted one, bit for bit; stops are clean."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hyperparallel.errors import CheckpointError, RunError
from hyperparallel.runtime.checkpoint.checkpointer import Checkpointer
from hyperparallel.runtime.checkpoint.folder import newest
from hyperparallel.train.batches import Batches
from hyperparallel.train.config import TrainConfig, make_config
from hyperparallel.train.loop import TrainResult, train
from hyperparallel.train.metrics import read_metrics
from hyperparallel.train.steps import SingleDeviceStep
from hyperparallel.train.stop import StopSign, on_signals
from hyperparallel.train.tokens import TokenFile
from tests.ranks import run_ranks


class Tiny(nn.Module):
    """A tied embedding with dropout: random state matters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.drop(self.embed(input_ids)))
        flat, targets = logits[:, :-1].reshape(-1, 50), labels[:, 1:].reshape(-1)
        return {"loss": nn.functional.cross_entropy(flat, targets)}


def batches(batch_size: int = 4) -> Batches:
    ids = np.random.RandomState(0).randint(0, 50, 300).astype(np.uint16)
    return Batches(TokenFile(Path("memory"), ids, 50, "hash"), batch_size, seq_len=6, seed=1)


def single() -> SingleDeviceStep:
    torch.manual_seed(0)
    model = Tiny()
    return SingleDeviceStep(model, torch.optim.AdamW(model.parameters(), lr=1.0), clip_norm=1.0)


def config(folder: Path | None, **fields: Any) -> TrainConfig:
    base = {"steps": 12, "lr": 0.05, "warmup_steps": 3, "run_folder": folder}
    return make_config(base | {"checkpoint_every": 4 if folder else 0} | fields)


class Doomed(SingleDeviceStep):
    """Fails at one step, as a killed run would."""

    def __init__(self, inner: SingleDeviceStep, fails_at: int, act: Callable[[], None]) -> None:
        super().__init__(inner.module, inner.optimizer, inner.clip_norm)
        self.left, self.act = fails_at, act

    def step(self, batch: Mapping[str, torch.Tensor]) -> Mapping[str, float]:
        if self.left == 0:
            self.act()
        self.left -= 1
        return super().step(batch)


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Ctrl-C as in a terminal: what a shell starts in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def fail() -> None:
    raise OSError("pulled the plug")


@pytest.mark.fake
def test_losses_fall_and_files_are_written(tmp_path: Path) -> None:
    result = train(config(tmp_path, steps=60), single(), batches())
    assert np.mean(result.losses[-5:]) < np.mean(result.losses[:5]) - 0.3
    assert result == TrainResult(0, 60, result.losses, False)
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["loss"] for record in records] == list(result.losses)
    assert records[0]["lr"] == pytest.approx(0.05 / 3) and records[0]["tokens_per_second"] > 0
    assert TrainConfig.model_validate_json((tmp_path / "config.json").read_text()).steps == 60
    saved = sorted(os.listdir(tmp_path / "checkpoints"))
    assert saved == ["latest", "step_000052", "step_000056", "step_000060"]


@pytest.mark.fake
@pytest.mark.parametrize("fails_at", [5, 8, 11])
def test_resume_after_a_crash_is_bit_exact(tmp_path: Path, fails_at: int) -> None:
    whole = train(config(None), single(), batches())
    with pytest.raises(OSError, match="pulled the plug"):
        train(config(tmp_path), Doomed(single(), fails_at, fail), batches())
    torch.manual_seed(99)  # a new process has other random state, and other weights
    step_fn = SingleDeviceStep(model := Tiny(), torch.optim.AdamW(model.parameters()), 1.0)
    result = train(config(tmp_path), step_fn, batches())
    assert result.first_step == fails_at // 4 * 4
    assert result.losses == whole.losses[result.first_step :]
    assert [r["loss"] for r in read_metrics(tmp_path / "metrics.jsonl")] == list(whole.losses)
    again = train(config(tmp_path), single(), batches())
    assert (again.first_step, again.next_step, again.losses) == (12, 12, ())


@pytest.mark.fake
def test_no_resume_starts_over(tmp_path: Path) -> None:
    first = train(config(tmp_path), single(), batches())
    second = train(config(tmp_path, resume=False), single(), batches())
    assert second.first_step == 0 and second.losses == first.losses


@pytest.mark.fake
def test_other_data_is_refused(tmp_path: Path) -> None:
    train(config(tmp_path), single(), batches())
    with pytest.raises(CheckpointError, match=r"batch_size 4.*resume=false"):
        train(config(tmp_path, steps=20), single(), batches(batch_size=5))


@pytest.mark.fake
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.usefixtures("interrupts")
def test_a_signal_stops_after_the_step_and_saves(tmp_path: Path, number: int) -> None:
    def kill() -> None:
        os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    whole = train(config(None), single(), batches())
    result = train(config(tmp_path), Doomed(single(), 5, kill), batches())
    assert result.was_stopped and result.next_step == 6  # step 5 was finished
    assert signal.getsignal(number) is before
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_000006\n"
    rest = train(config(tmp_path), single(), batches())
    assert result.losses + rest.losses == whole.losses


@pytest.mark.fake
@pytest.mark.usefixtures("interrupts")
def test_a_second_interrupt_is_not_held_back() -> None:
    with pytest.raises(KeyboardInterrupt), on_signals(StopSign(0, 1)):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)


@pytest.mark.fake
def test_an_interrupt_that_is_ignored_stays_so() -> None:
    """As in a launched rank, whose launcher decides: also while and after a SIGTERM stops the run."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        sign = StopSign(0, 1)
        with on_signals(sign):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
            assert sign.before(0) and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.fake
def test_a_stop_is_the_same_step_on_all_ranks() -> None:
    """Ranks in lockstep (a barrier a step), asked at different moments: nobody waits alone."""
    for asked_at in range(6):
        store = torch.distributed.HashStore()
        barrier = threading.Barrier(3, timeout=5)
        stops: dict[int, int] = {}

        def one(rank: int, asked_at: int, store: Any, barrier: Any, stops: Any) -> None:
            sign = StopSign(rank, 3, store)
            for step in range(20):
                if rank == 1 and step == asked_at:
                    sign.ask()
                if sign.before(step):
                    stops[rank] = step
                    return
                barrier.wait()

        args = (asked_at, store, barrier, stops)
        threads = [threading.Thread(target=one, args=(rank, *args)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert stops == dict.fromkeys(range(3), asked_at + 2)


class Averaged(SingleDeviceStep):
    """Data parallel by hand on two ranks: half of the rows each, gradients averaged."""

    rank = 0

    def step(self, batch: Mapping[str, torch.Tensor]) -> Mapping[str, float]:
        self.optimizer.zero_grad()
        mine = {name: rows.chunk(2)[self.rank] for name, rows in batch.items()}
        loss = self.module(**mine)["loss"]
        loss.backward()
        for parameter in self.module.parameters():
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad.div_(2)
        self.optimizer.step()
        value = loss.detach()
        torch.distributed.all_reduce(value)
        return {"loss": float(value) / 2}


@pytest.mark.procs
def test_two_ranks_resume_bit_exact_and_stop_together(tmp_path: Path) -> None:
    def averaged(rank: int) -> Averaged:
        inner = single()
        torch.manual_seed(rank)  # other dropout on each rank
        step_fn = Averaged(inner.module, inner.optimizer)
        step_fn.rank = rank
        return step_fn

    def whole(rank: int) -> tuple[float, ...]:
        return train(config(None), averaged(rank), batches(), rank=rank, world=2).losses

    def killed(rank: int) -> None:
        step_fn = averaged(rank)
        real, count = step_fn.step, [0]

        def step(batch: Mapping[str, torch.Tensor]) -> Mapping[str, float]:
            count[0] += 1
            if rank == 1 and count[0] == 7:
                until = time.monotonic() + 20  # the save of step 4 goes on in the background
                while newest(tmp_path / "checkpoints") is None and time.monotonic() < until:
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(batch)

        step_fn.step = step  # type: ignore[method-assign]
        train(config(tmp_path), step_fn, batches(), rank=rank, world=2)

    def stopped(rank: int) -> TrainResult:
        step_fn = averaged(rank)
        real, count = step_fn.step, [0]

        def step(batch: Mapping[str, torch.Tensor]) -> Mapping[str, float]:
            count[0] += 1
            if rank == 1 and count[0] == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return real(batch)

        step_fn.step = step  # type: ignore[method-assign]
        return train(config(tmp_path), step_fn, batches(), rank=rank, world=2)

    def rest(rank: int) -> TrainResult:
        return train(config(tmp_path), averaged(rank), batches(), rank=rank, world=2)

    expected = run_ranks(2, whole)[0]
    with pytest.raises(RunError):
        run_ranks(2, killed)
    first = run_ranks(2, stopped)
    assert {(r.first_step, r.next_step, r.was_stopped) for r in first} == {(4, 8, True)}
    last = run_ranks(2, rest)
    assert {(r.first_step, r.next_step) for r in last} == {(8, 12)}
    assert first[0].losses + last[0].losses == expected[4:]
    with Checkpointer(tmp_path / "checkpoints") as keeper:
        assert keeper.read_index().world == 2
