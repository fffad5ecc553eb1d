"""Who runs what when: pipeline schedules as data, free of torch."""

from hyperparallel.mpmd.action import Action, Schedule, homes, needs_of
from hyperparallel.mpmd.bubble import Times, bubble_share, most_in_flight, timed
from hyperparallel.mpmd.check import check_schedule, in_flight
from hyperparallel.mpmd.message import Message, Receive, Send, lowered
from hyperparallel.mpmd.schedules.record import PipelineSchedule, RankSeconds
from hyperparallel.mpmd.schedules.table import SCHEDULES, schedule, schedule_named

__all__ = [
    "SCHEDULES",
    "Action",
    "Message",
    "PipelineSchedule",
    "RankSeconds",
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
    "schedule_named",
    "timed",
]
