"""The clock: runs tasks as streams, links and compute units allow, from event to event.

A task begins when the one before it on its stream has ended and what it needs is done. While it runs it
gets on at a speed up to 1:

    communication   what its links leave it: max-min fair shares (`sharing.py`)
    computation     (1 - units held by its rank's communications) / slowdown, but at least 1/100, shared
                    evenly among the computations of the rank; slowdown counts while any unit is held

Speeds change only when tasks begin or end, so time jumps from one such event to the next, and only tasks
that share something with it are looked at: a link on which all fit is never a reason to wait.

Leaves out queues in switches, packets, and jitter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from hyperparallel.errors import PlanError
from hyperparallel.simulate.sharing import fair_rates
from hyperparallel.simulate.task import Task, check_tasks
from hyperparallel.simulate.timeline import Sample, Span, Timeline, is_compute

FULL_LINK = 1.0 + 1e-9
"""A link is contended above this load; sums of shares round."""

SLOWEST = 0.01
"""Computation goes on at this speed when communications hold all units."""


def simulate(tasks: Sequence[Task], slowdown: float = 1.0) -> Timeline:
    """The timeline of tasks; slowdown: how much longer computation takes beside communication.

    Raises `PlanError` for tasks that wait for one another, naming one that never begins.

    >>> a = Task("a", 0, "compute", 2.0)
    >>> b = Task("b", 0, "comm", 3.0, kind="all_reduce")
    >>> simulate([a, b, Task("c", 0, "compute", 1.0, needs=[1])]).step_seconds
    4.0
    """
    check_tasks(tasks)
    if not slowdown >= 1.0:
        raise PlanError("slowdown", slowdown, "a factor of 1 or more")
    return _Run(tasks, slowdown).run()


class _Run:
    """One simulation: the state of every task, of links and of ranks, by position in the list."""

    def __init__(self, tasks: Sequence[Task], slowdown: float) -> None:
        count = len(tasks)
        self.tasks, self.slowdown, self.now = tasks, slowdown, 0.0
        self.begin, self.end = [-1.0] * count, [-1.0] * count
        self.left, self.speed, self.since = [0.0] * count, [1.0] * count, [0.0] * count
        self.version = [-1] * count  # of a task's latest event; -1: it has none yet
        self.events: list[tuple[float, int, int]] = []
        self.load: dict[str, float] = {}
        self.users: dict[str, set[int]] = {}
        self.held: dict[int, float] = {}
        self.computing: dict[int, set[int]] = {}
        self.dirty_ranks: set[int] = set()
        self.dirty_links: set[str] = set()
        self.in_use: dict[int, float] = {}
        self.memory: dict[int, list[Sample]] = {}
        self.before = [-1] * count
        self.missing = [0] * count
        self.followers: list[list[int]] = [[] for _ in tasks]
        self._link_up()

    def _link_up(self) -> None:
        last: dict[tuple[int, str], int] = {}
        self.computes = [False] * len(self.tasks)
        known: dict[str, bool] = {}
        for i, task in enumerate(self.tasks):
            place = task.rank, task.stream
            if task.stream not in known:
                known[task.stream] = is_compute(task.stream)
            self.computes[i] = known[task.stream]
            needs = set(task.needs)
            if place in last:
                self.before[i] = last[place]
                needs.add(last[place])
            last[place] = i
            self.missing[i] = len(needs)
            for need in needs:
                self.followers[need].append(i)

    def run(self) -> Timeline:
        events, version = self.events, self.version
        self._begin_all([i for i, missing in enumerate(self.missing) if not missing])
        while events:
            self.now, i, stamp = heappop(events)
            # An event of a task that has changed its speed since is void: leaving it in the heap costs less
            # than finding it.
            ended = [i] if stamp == version[i] else []
            # All that ends at one moment ends before anything begins, so that what begins finds free what
            # they held.
            while events and events[0][0] == self.now:
                _, j, other = heappop(events)
                if other == version[j]:
                    ended.append(j)
            ready: list[int] = []
            for j in ended:
                self._finish(j, ready)
            self._begin_all(ready)
        stuck = next((i for i, end in enumerate(self.end) if end < 0.0), None)
        if stuck is not None:
            raise PlanError("tasks", self._stuck(stuck), "tasks that do not wait for one another")
        return self._timeline()

    def _begin_all(self, ready: list[int]) -> None:
        """Begin tasks, and those without work behind them, and set the speeds that change."""
        tasks, now = self.tasks, self.now
        while ready:
            i = ready.pop()
            task = tasks[i]
            self.begin[i] = now
            if task.alloc_bytes:
                self._use(task.rank, task.alloc_bytes)
            # Ends at once, and with it may begin what waits for it: no moment passes.
            if task.work == 0.0:
                self._finish(i, ready, ran=False)
                continue
            self.left[i], self.since[i] = task.work, now
            if self.computes[i]:
                self.computing.setdefault(task.rank, set()).add(i)
                # Not alone: its speed is set below, with that of the others of its rank.
                if self.held.get(task.rank) or len(self.computing[task.rank]) > 1:
                    self.dirty_ranks.add(task.rank)
                    continue
            else:
                if task.units:
                    self.held[task.rank] = self.held.get(task.rank, 0.0) + task.units
                    self.dirty_ranks.add(task.rank)
                # On a full link all flows get new speeds, this one too.
                if task.demand and self._take(i):
                    continue
            self.speed[i], self.version[i] = 1.0, 0
            heappush(self.events, (now + task.work, i, 0))
        if self.dirty_links:
            self._share_links()
        if self.dirty_ranks:
            self._share_units()

    def _take(self, i: int) -> bool:
        """Put a task on its links; whether one of them is too full for all."""
        contended = False
        for link, share in self.tasks[i].demand.items():
            self.load[link] = load = self.load.get(link, 0.0) + share
            self.users.setdefault(link, set()).add(i)
            if load > FULL_LINK:
                self.dirty_links.add(link)
                contended = True
        return contended

    def _finish(self, i: int, ready: list[int], ran: bool = True) -> None:
        task = self.tasks[i]
        self.end[i] = self.now
        if ran:
            self.version[i] += 1
            if self.computes[i]:
                others = self.computing[task.rank]
                others.discard(i)
                if others:
                    self.dirty_ranks.add(task.rank)
            else:
                if task.units:
                    self.held[task.rank] -= task.units
                    self.dirty_ranks.add(task.rank)
                for link, share in task.demand.items():
                    # Only those on a link that was too full can go faster now.
                    if self.load[link] > FULL_LINK:
                        self.dirty_links.add(link)
                    users = self.users[link]
                    users.discard(i)
                    # Exactly 0 when nobody is left, whatever was rounded before.
                    self.load[link] = self.load[link] - share if users else 0.0
        if task.free_bytes:
            self._use(task.rank, -task.free_bytes)
        missing = self.missing
        for follower in self.followers[i]:
            missing[follower] -= 1
            if not missing[follower]:
                ready.append(follower)

    def _set_speed(self, i: int, speed: float) -> None:
        """Note what a task has done so far, and when it will end at its new speed."""
        # Version -1: it has no event yet, whatever its speed.
        if speed == self.speed[i] and self.version[i] >= 0:
            return
        left = self.left[i] - self.speed[i] * (self.now - self.since[i])
        self.left[i] = left = left if left > 0.0 else 0.0
        self.since[i], self.speed[i] = self.now, speed
        self.version[i] += 1
        heappush(self.events, (self.now + left / speed, i, self.version[i]))

    def _share_units(self) -> None:
        for rank in self.dirty_ranks:
            running = self.computing.get(rank)
            if running:
                held = self.held.get(rank, 0.0)
                # Sums and differences of shares round: what is left of no unit held is not a slowdown.
                speed = max((1.0 - held) / self.slowdown, SLOWEST) if held > 1e-12 else 1.0
                for i in running:
                    self._set_speed(i, speed / len(running))
        self.dirty_ranks.clear()

    def _share_links(self) -> None:
        """New speeds for all that share a contended link, directly or through others."""
        tasks, todo = self.tasks, list(self.dirty_links)
        # A flow that gets less on one link leaves more to others on its other links: all that hang together
        # are shared anew.
        seen, flows = set(todo), set[int]()
        while todo:
            for i in self.users[todo.pop()]:
                if i not in flows:
                    flows.add(i)
                    for link in tasks[i].demand:
                        if link not in seen and self.load[link] > FULL_LINK:
                            seen.add(link)
                            todo.append(link)
        self.dirty_links.clear()
        order = sorted(flows)
        for i, speed in zip(order, fair_rates([tasks[i].demand for i in order]), strict=True):
            self._set_speed(i, speed)

    def _use(self, rank: int, num_bytes: float) -> None:
        self.in_use[rank] = now = self.in_use.get(rank, 0.0) + num_bytes
        self.memory.setdefault(rank, []).append(Sample(self.now, now))

    def _timeline(self) -> Timeline:
        spans = []
        for i, task in enumerate(self.tasks):
            begin = self.begin[i]
            if task.kind == "wait":
                # As a measured wait: from when its stream came to it, not from when it could go on.
                begin = self.end[self.before[i]] if self.before[i] >= 0 else 0.0
            spans.append(Span(task.name, task.rank, task.stream, task.kind, begin, self.end[i]))
        memory = {rank: tuple(samples) for rank, samples in self.memory.items()}
        return Timeline(tuple(spans), memory)

    def _stuck(self, i: int) -> str:
        needs: Iterable[int] = [*self.tasks[i].needs, *([self.before[i]] if self.before[i] >= 0 else [])]
        names = ", ".join(self.tasks[need].name for need in needs if self.end[need] < 0.0)
        return f"{self.tasks[i].name} on rank {self.tasks[i].rank}, which waits for {names}"
