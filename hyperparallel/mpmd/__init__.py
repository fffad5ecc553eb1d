"""Who runs what when: pipeline schedules as data, free of torch."""

from hyperparallel.mpmd.action import Action, Schedule, homes, needs_of
from hyperparallel.mpmd.bubble import Times, bubble_share, most_in_flight, timed
from hyperparallel.mpmd.check import check_schedule, in_flight
from hyperparallel.mpmd.message import Message, Receive, Send, lowered
from hyperparallel.mpmd.schedule import SCHEDULES, schedule

__all__ = [
    "SCHEDULES",
    "Action",
    "Message",
    "Receive",
    "Schedule",
    "Send",
    "Times",
    "bubble_share",
    "check_schedule",
    "homes",
    "in_flight",
    "lowered",
    "most_in_flight",
    "needs_of",
    "schedule",
    "timed",
]
