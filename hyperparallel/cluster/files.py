"""Cluster files: one YAML (or JSON) form of a `Cluster`, read with messages that name the wrong field.

A file gives every field in SI units, as the names say. Unknown keys are refused with the near ones
(`complaints.py`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import yaml

from hyperparallel.cluster.cluster import Cluster
from hyperparallel.cluster.complaints import no_mapping, not_yaml, readable
from hyperparallel.cluster.market import check_market
from hyperparallel.errors import ClusterError
from hyperparallel.foreign_errors import load_yaml


class _Dumper(yaml.SafeDumper):
    """Writes big and small numbers as 4.5e+11, and sizes in one line."""


def _float(dumper: yaml.SafeDumper, value: float) -> yaml.Node:
    text = repr(value)
    if value and not 1e-3 <= abs(value) < 1e5:
        digits, exponent = f"{Decimal(text).normalize():e}".split("e")
        # YAML 1.1 reads a float only where there is a point and the exponent has a sign.
        text = f"{digits if '.' in digits else digits + '.0'}e{exponent}"
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


def _size(dumper: yaml.SafeDumper, value: tuple[float, ...]) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=True)


_Dumper.add_representer(float, _float)
_Dumper.add_representer(tuple, _size)


def cluster_yaml(cluster: Cluster) -> str:
    """The text of a cluster file; `parse_cluster` of it is the same value."""
    return yaml.dump(_plain(cluster), Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True)


def parse_cluster(text: str, where: str = "") -> Cluster:
    """Read the text of a cluster file; `ClusterError` names the field that is wrong. where: its name."""
    try:
        data = load_yaml(text)
    except yaml.YAMLError as error:
        raise not_yaml(error, where) from None
    if not isinstance(data, Mapping):
        raise no_mapping(data, where)
    return _validated(dict(data))


def read_cluster(path: Path) -> Cluster:
    """The cluster of a file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not text"
        raise ClusterError("cluster", str(path), f"a readable cluster file ({why}) or a preset") from None
    return parse_cluster(text, str(path))


def _validated(data: dict[str, Any]) -> Cluster:
    from pydantic import ValidationError

    try:
        cluster: Cluster = _adapter().validate_python(data)
    except ValidationError as errors:
        # A misspelt key is also a missing one: the spelling is what to say.
        found = sorted(errors.errors(), key=lambda error: error["type"] != "unexpected_keyword_argument")
        raise readable(found[0], data) from None
    check_market(cluster)
    return cluster


@functools.cache
def _adapter() -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(Cluster)


def _plain(value: Any) -> Any:
    """Dataclasses, tuples and mappings as what YAML writes; fields at their default are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            item.name: _plain(getattr(value, item.name))
            for item in dataclasses.fields(value)
            if getattr(value, item.name) != item.default
        }
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        flat = all(isinstance(inner, (int, float)) for inner in value)
        return value if flat else [_plain(inner) for inner in value]
    return value
