"""Copies between host and device, both ways, on a stream beside the compute: what moving memory relies on."""

from __future__ import annotations

import torch

from hyperparallel.runtime.job.session import Session
from tests.gpu.places import Place, keep_busy, places

SIZE = 1 << 22


def copied(session: Session) -> None:
    device = session.device
    on_cuda = device.type == "cuda"
    seed = torch.Generator().manual_seed(session.rank)
    source = torch.randn(SIZE, generator=seed)
    host = source.pin_memory() if on_cuda else source.clone()
    back = torch.empty(SIZE, pin_memory=on_cuda)
    for turn in range(4):
        if not on_cuda:
            back.copy_(host.to(device).mul(turn + 1))
        else:
            copies, main = torch.cuda.Stream(), torch.cuda.current_stream()
            arrived, ready, done = (torch.cuda.Event() for _ in range(3))
            with torch.cuda.stream(copies):
                there = host.to(device, non_blocking=True)
                arrived.record()
            keep_busy(device)
            main.wait_event(arrived)
            there.record_stream(main)
            result = there * (turn + 1)
            ready.record()
            with torch.cuda.stream(copies):
                copies.wait_event(ready)
                back.copy_(result, non_blocking=True)
                result.record_stream(copies)
                done.record()
            del there, result  # both streams have been told, so their memory waits for them
            torch.full((SIZE,), -1.0, device=device)
            done.synchronize()
        assert torch.equal(back, source * (turn + 1)), turn


@places(1)
def test_pinned_copies_both_ways_with_events(place: Place) -> None:
    place.run(copied)
