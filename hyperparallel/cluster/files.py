"""Cluster files: one YAML (or JSON) form of a `Cluster`, read with messages that name the wrong field.

A file gives every field in SI units, as the names say. Unknown keys are refused with the near ones.
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
from hyperparallel.cluster.device import Device, Gemm
from hyperparallel.cluster.fabric import Fabric
from hyperparallel.cluster.threads import Threads
from hyperparallel.cluster.tiers import Tier
from hyperparallel.errors import ClusterError, nearest

_PARTS: dict[str, Any] = {
    "device": Device, "gemm": Gemm, "threads": Threads, "memory": Tier, "fabric": Fabric
}  # fmt: skip


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


def to_yaml(cluster: Cluster) -> str:
    """The text of a cluster file; `from_yaml` of it is the same value."""
    return yaml.dump(_plain(cluster), Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True)


def from_yaml(text: str) -> Cluster:
    """Read the text of a cluster file; `ClusterError` names the field that is wrong."""
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ClusterError("cluster file", str(error), "YAML or JSON") from None
    if not isinstance(data, Mapping):
        raise ClusterError("cluster file", data, "a mapping with name, device, memory, fabric")
    return _validated(dict(data))


def load(source: str | Path, devices: int | None = None) -> Cluster:
    """The cluster of a file (something with a suffix or a folder in its name), or of a preset."""
    from hyperparallel.cluster.presets import preset

    path = Path(source)
    if not path.is_file() and path.suffix not in (".yaml", ".yml", ".json") and len(path.parts) < 2:
        return preset(str(source), devices)
    cluster = read(path)
    return cluster if devices is None else cluster.resized(devices)


def read(path: Path) -> Cluster:
    """The cluster of a file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not text"
        raise ClusterError("cluster", str(path), f"a readable cluster file ({why}) or a preset") from None
    return from_yaml(text)


def _validated(data: dict[str, Any]) -> Cluster:
    from pydantic import ValidationError

    try:
        cluster: Cluster = _adapter().validate_python(data)
    except ValidationError as errors:
        # A misspelt key is also a missing one: the spelling is what to say.
        found = sorted(errors.errors(), key=lambda error: error["type"] != "unexpected_keyword_argument")
        raise _readable(found[0], data) from None
    return cluster


@functools.cache
def _adapter() -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(Cluster)


def _readable(error: Any, data: Mapping[str, Any]) -> ClusterError:
    """The first of pydantic's complaints as an error of ours."""
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, ClusterError):
        return cause  # raised by the value itself; names its field already
    location = error["loc"]
    where = ".".join(_named(location, data)) or "cluster file"
    given: Any = error["input"]
    if error["type"] == "unexpected_keyword_argument":
        parts = [part for part in location[:-1] if isinstance(part, str)]
        known = [f.name for f in dataclasses.fields(_PARTS.get(parts[-1], Cluster) if parts else Cluster)]
        near = nearest(str(location[-1]), known, 1)
        return ClusterError(where, str(location[-1]), ", ".join(known), None if near == "none" else near)
    if error["type"] in ("missing", "missing_argument"):
        return ClusterError(where, None, "a value; this field is required")
    return ClusterError(where, given, error["msg"])


def _named(location: tuple[Any, ...], data: Any) -> list[str]:
    """A location with the names of list entries for their numbers: fabric.node.bytes_s."""
    words: list[str] = []
    for part in location:
        known = data is not None and (isinstance(data, list) or (isinstance(data, Mapping) and part in data))
        data = data[part] if known else None
        named = isinstance(part, int) and isinstance(data, Mapping) and isinstance(data.get("name"), str)
        words.append(data["name"] if named else str(part))
    return words


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
