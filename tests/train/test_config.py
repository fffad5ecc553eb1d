"""Training configuration: refused fields, and the learning rate over a run."""

import pytest

from hyperparallel.errors import UserError
from hyperparallel.train.config import TrainConfig, learning_rate, make_config

pytestmark = pytest.mark.pure


def test_unknown_fields_are_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"write batch_size.* instead"):
        make_config({"batchsize": 3})


@pytest.mark.parametrize(
    ("field", "value"),
    [("steps", 0), ("lr", -1), ("dtype", "int8"), ("clip_norm", 0), ("vocab_size", 10)],
)
def test_bad_values_name_their_field(field: str, value: object) -> None:
    with pytest.raises(UserError, match=f"^{field}: got"):
        make_config({field: value})


def test_json_round_trip() -> None:
    config = make_config({"data": "some/folder", "betas": "[0.8, 0.9]"} | {"betas": (0.8, 0.9)})
    assert TrainConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 5), (2, 1), (50, 10), (50, 0)])
def test_rates_rise_once_then_fall_within_bounds(schedule: str, steps: int, warmup: int) -> None:
    config = make_config({"steps": steps, "warmup_steps": warmup, "schedule": schedule, "lr": 2.0})
    rates = [learning_rate(config, step) for step in range(steps)]
    top = min(warmup, steps)
    assert rates[:top] == sorted(rates[:top]) and max(rates) <= 2.0
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert all(rate >= 0.2 - 1e-12 for rate in rates[warmup:])
    if steps > warmup + 1:
        assert rates[-1] == pytest.approx(2.0 if schedule == "constant" else 0.2)
