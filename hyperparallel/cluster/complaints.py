"""What is wrong in a cluster file, in our words: the field, what stands there, what is allowed, an example.

The text is read by PyYAML and its fields are checked by pydantic; what both say
(`hyperparallel/foreign_errors.py`) becomes one line for the person who wrote the file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import yaml

from hyperparallel.cluster.cluster import Cluster
from hyperparallel.cluster.device import Device, Gemm
from hyperparallel.cluster.fabric import EXAMPLE_TIER, Fabric
from hyperparallel.cluster.memory_tiers import EXAMPLE_MEMORY, Tier
from hyperparallel.cluster.threads import Threads
from hyperparallel.errors import NOTHING, ClusterError, Words, nearest
from hyperparallel.foreign_errors import asked_for, no_yaml, shown

_PARTS: dict[str, Any] = {
    "device": Device, "gemm": Gemm, "threads": Threads, "memory": Tier, "fabric": Fabric
}  # fmt: skip

_DEVICE = "{name: h100, peak_flop_s: {bf16: 989e12}, memory_bytes_s: 3.35e12}"
FIELD_EXAMPLES = {
    "name": "mine",
    "device": _DEVICE,
    "memory": f"[{EXAMPLE_MEMORY}]",
    "fabric": f"[{EXAMPLE_TIER}]",
    "notes": "[one sentence]",
    "peak_flop_s": "{bf16: 989e12}",
    "memory_bytes_s": "3.35e12",
    "capacity_bytes": "80e9",
    "read_bytes_s": "3.35e12",
    "write_bytes_s": "3.35e12",
    "total_bytes_s": "440e9",
    "bytes_s": "450e9",
    "latency_s": "2e-6",
    "launch_s": "4e-6",
    "kind": "switch",
    "size": "[8]",
    "units": "132",
    "gemm": "{peak: 0.85}",
}
"""What may stand in a field."""

_MEANT = {"bandwidth": "bytes_s", "latency": "latency_s", "capacity": "capacity_bytes", "type": "kind",
          "count": "size", "devices": "size"}  # fmt: skip
"""Fields as other tools call them."""

def not_yaml(error: yaml.YAMLError, where: str) -> ClusterError:
    """The error for text that is no YAML: where it stops being that, and what is wrong there."""
    return ClusterError("cluster file", *no_yaml(error, where))


def no_mapping(data: Any, where: str) -> ClusterError:
    """The error for a file whose text is no mapping at all."""
    given = Words(f"{where}: {shown(data)}") if where else shown(data)
    return ClusterError("cluster file", given, "a mapping with name, device, memory and fabric")


def readable(error: Any, data: Mapping[str, Any]) -> ClusterError:
    """One of pydantic's complaints as an error of ours."""
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, ClusterError):
        return cause  # raised by the value itself; names its field already
    location = error["loc"]
    where = ".".join(_named(location, data)) or "cluster file"
    field = next((part for part in reversed(location) if isinstance(part, str)), "")
    if error["type"] == "unexpected_keyword_argument":
        parts = [part for part in location[:-1] if isinstance(part, str)]
        part = _PARTS.get(parts[-1], Cluster) if parts else Cluster
        known = [f.name for f in dataclasses.fields(part)]
        meant = _MEANT.get(nearest(field, _MEANT, 1) or "")
        near = nearest(field, known, 1) if meant is None or meant not in known else meant
        return ClusterError(where, field, ", ".join(known), near)
    example = f"{field}: {FIELD_EXAMPLES[field]}" if field in FIELD_EXAMPLES else None
    if error["type"] in ("missing", "missing_argument"):
        return ClusterError(where, NOTHING, f"a value; {field} is required", example)
    given = error["input"]
    if field == "size" and isinstance(given, int):
        example = f"size: [{given}]"
    return ClusterError(where, shown(given), asked_for(error), example)


def _named(location: tuple[Any, ...], data: Any) -> list[str]:
    """A location with the names of list entries for their numbers: fabric.node.bytes_s."""
    words: list[str] = []
    for part in location:
        known = (isinstance(data, list) and isinstance(part, int) and part < len(data)) or (
            isinstance(data, Mapping) and part in data
        )
        data = data[part] if known else None
        named = isinstance(part, int) and isinstance(data, Mapping) and isinstance(data.get("name"), str)
        words.append(data["name"] if named else str(part))
    return words
