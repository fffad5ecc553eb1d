"""Every field of a run's config changes what a run does; one that would do nothing is refused.

A new field without an entry in `CHANGES` fails here by its name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperparallel.cli.request import Request
from hyperparallel.cli.run import make_job
from hyperparallel.errors import UserError
from hyperparallel.layout import Mesh
from hyperparallel.plan import Plan
from hyperparallel.recipes import Recipe
from hyperparallel.runtime.job.launch import launch
from hyperparallel.runtime.job.session import Session
from hyperparallel.simulate.trace import read_trace
from hyperparallel.train.config import TrainConfig, make_config
from hyperparallel.train.job import TrainJob, train_rank
from hyperparallel.train.loop import train
from hyperparallel.train.tokenizer import train_tokenizer

pytestmark = [pytest.mark.procs, pytest.mark.timeout(300)]
BASE = {"steps": 4, "batch_size": 4, "seq_len": 8, "vocab_size": 300, "warmup_steps": 1, "lr": 0.1}
KEPT = {"checkpoint_every": 1}

CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "model": ({"trace": "step.json"}, {"model": "another"}),
    "dtype": ({}, {"dtype": "float64"}),
    "compute": ({}, {"compute": "bfloat16"}),
    "seed": ({}, {"seed": 1}),
    "data": ({}, {"data": "other.txt"}),
    "tokenizer": ({}, {"tokenizer": "letters"}),
    "vocab_size": ({}, {"vocab_size": 310}),
    "max_text_bytes": ({}, {"max_text_bytes": 900}),
    "steps": ({}, {"steps": 3}),
    "batch_size": ({}, {"batch_size": 2}),
    "seq_len": ({}, {"seq_len": 6}),
    "accumulate": ({"trace": "step.json"}, {"accumulate": 2}),
    "lr": ({}, {"lr": 0.05}),
    "min_lr_ratio": ({}, {"min_lr_ratio": 0.9}),
    "warmup_steps": ({}, {"warmup_steps": 3}),
    "schedule": ({}, {"schedule": "constant"}),
    "betas": ({}, {"betas": (0.5, 0.95)}),
    "weight_decay": ({}, {"weight_decay": 0.9}),
    "clip_norm": ({}, {"clip_norm": 1e-3}),
    "run_folder": ({}, {"run_folder": "elsewhere"}),
    "checkpoint_every": (KEPT, {"checkpoint_every": 3}),
    "checkpoint_keep": (KEPT, {"checkpoint_keep": 1}),
    "resume": ({**KEPT, "run_folder": "again"}, {"resume": False}),
    "trace": ({}, {"trace": "step.json"}),
    "tensorboard": ({}, {"tensorboard": True}),
}
"""By field: what is set beside `BASE`, and the change that must change the run."""


class Scorer(nn.Module):
    """An embedding and a head; rates of 0.1 show in the losses after a step."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, 6), nn.Linear(6, vocab)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.embed(input_ids)))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def build(config: TrainConfig) -> nn.Module:
    return Scorer(config.vocab_size)


def job_of(folder: Path, made: Path, fields: dict[str, Any]) -> TrainJob:
    """A run in a folder; texts and tokenizers stand in the folder `made`."""
    folder.mkdir(parents=True, exist_ok=True)
    rooms = {"data": made, "tokenizer": made, "trace": folder, "run_folder": folder}
    at = {name: rooms[name] / value for name, value in fields.items() if name in rooms}
    config = make_config({"data": made / "text.txt", "run_folder": folder / "run", **BASE, **fields, **at})
    recipe = Recipe("scorer", build, Plan, {})
    plan = Plan(Mesh((1,), ("dp",)), compute=config.compute)
    return make_job(Request(recipe, config, plan))


def run_job(session: Session, job: TrainJob) -> Any:
    """How a run ended, and the files that it left."""
    result, folder = train_rank(session, job), job.config.run_folder
    assert folder is not None
    files = sorted(str(p.relative_to(folder.parent)) for p in folder.rglob("*") if "tfevents" not in p.name)
    files += ["a file of TensorBoard"] if any(folder.rglob("*tfevents*")) else []
    traced: Any = None
    if job.config.trace is not None:
        timeline = read_trace(job.config.trace)
        traced = timeline.facts["model"], len(timeline.spans)
    return result, files, traced


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """By field, the outcome of the run before the change and of the one after it."""
    made = tmp_path_factory.mktemp("run")
    for name, line in (("text.txt", "the {n} says hello to {n}.\n"), ("other.txt", "{n} and {n}, others\n")):
        (made / name).write_text("".join(line.format(n=n * n % 97) for n in range(400)))
    letters = train_tokenizer(["abc"], 257)
    (made / "letters").mkdir()
    letters.backend.save(str(made / "letters" / "tokenizer.json"))
    found: dict[str, list[Any]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(made / "cache"))
        jobs = {name: jobs_of(made / name, made, *change) for name, change in CHANGES.items()}
    everything = launch(run_all, 1, args=([job for each in jobs.values() for job in each],), threads=1)[0]
    for name, each in jobs.items():
        found[name], everything = everything[: len(each)], everything[len(each) :]
    return found


def jobs_of(folder: Path, made: Path, fields: dict[str, Any], change: dict[str, Any]) -> list[TrainJob]:
    """The runs to compare, each in a folder of its own; of `resume`, two that find what a first one left."""
    if "resume" in change:
        shared = [job_of(folder / kind, made, fields) for kind in ("a", "b") for _ in range(2)]
        return [*shared[:3], job_of(folder / "b", made, fields | change)]
    return [job_of(folder / "a", made, fields), job_of(folder / "b", made, fields | change)]


def run_all(session: Session, jobs: list[TrainJob]) -> list[Any]:
    return [run_job(session, job) for job in jobs]


@pytest.mark.parametrize("name", TrainConfig.model_fields)
def test_every_field_changes_the_run(name: str, runs: dict[str, list[Any]]) -> None:
    assert name in runs, f"TrainConfig.{name} has no entry here that shows what it changes"
    *_, before, after = [runs[name][1], runs[name][3]] if name == "resume" else runs[name]
    assert before != after, f"{name} changes nothing"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"schedule": "constant", "min_lr_ratio": 0.2}, "min_lr_ratio: got 0.2; allowed: nothing where"),
        ({"checkpoint_keep": 2}, "checkpoint_keep: got 2; allowed: nothing where checkpoint_every is 0"),
    ],
)
def test_what_would_do_nothing_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        make_config(fields)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["checkpoint_every", "tensorboard"])
def test_files_without_a_folder_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"^{name}: got .*a run_folder to write to"):
        train(make_config({name: 1}), None, None)  # type: ignore[arg-type]
