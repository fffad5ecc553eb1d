"""Cluster files round-trip, and what is wrong in one is named where it stands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from hyperparallel.cluster.files import cluster_yaml, parse_cluster
from hyperparallel.cluster.load import load_cluster
from hyperparallel.cluster.presets import PRESETS, preset
from hyperparallel.errors import ClusterError

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "laptop"])
def test_every_machine_round_trips(name: str) -> None:
    cluster = preset(name)
    text = cluster_yaml(cluster)
    assert parse_cluster(text) == cluster
    assert parse_cluster(json.dumps(yaml.safe_load(text))) == cluster


def text(*changes: tuple[str, str]) -> str:
    result = cluster_yaml(preset("h100", 16))
    for old, new in changes:
        assert old in result
        result = result.replace(old, new, 1)
    return result


@pytest.mark.parametrize(
    ("changes", "field", "hint"),
    [
        ([("launch_s", "launch")], "device.launch", "write launch_s"),
        ([("latency_s", "latencys")], "memory.host.latencys", "write latency_s"),
        ([("tile_n", "tilen")], "device.gemm.tilen", "write tile_n"),
        ([("memory:", "tiers:")], "tiers", "memory"),
        ([("units: 132", "units: many")], "device.units", "a whole number"),
        ([("  kind: switch\n", "")], "fabric.nvlink.kind", "required; write kind: switch"),
        ([("size: [8]", "size: 8")], "fabric.nvlink.size", "a list, in brackets; write size: [8]"),
        ([("size: [8]", "size: [8.5]")], "fabric.nvlink.size.0", "a whole number"),
        ([("peak_flop_s:\n    bf16", "peak_flop_s:\n  - bf16")], "device.peak_flop_s", "a mapping"),
        ([("memory_bytes_s: 3.35e+12", "memory_bytes_s: 3 TB/s")], "device.memory_bytes_s", "a number"),
        ([("fabric:\n", "fabric: []\nlinks:\n")], "links", "allowed: name, device, memory, fabric, notes"),
        ([("bytes_s: 4.5e+11", "bandwith: 4.5e+11")], "fabric.nvlink.bandwith", "write bytes_s instead"),
        ([("bytes_s: 4.5e+11", "bandwidth: 4.5e+11")], "fabric.nvlink.bandwidth", "write bytes_s"),
        ([("kind: switch", "kind: hypercube")], "fabric.nvlink.kind", "switch, mesh, torus, ring"),
        ([("bytes_s: 4.5e+11", "bytes_s: 3.6e+12")], "fabric.nvlink.bytes_s", "write 450e9"),
        ([("latency_s: 8.0e-6", "latency_s: 8")], "fabric.infiniband.latency_s", "5e-6"),
        ([("name: h100\n", "name: [\n")], "cluster file", "YAML"),
        ([("name: h100\n", "name: h100\nname: a100\n")], "cluster file", "each key once: 'name' stands here"),
    ],
)
def test_a_mistake_is_named_where_it_stands(changes: list[tuple[str, str]], field: str, hint: str) -> None:
    with pytest.raises(ClusterError) as caught:
        parse_cluster(text(*changes))
    assert caught.value.field == field and hint in str(caught.value)


def test_no_name_is_suggested_where_none_is_like_it() -> None:
    for change in (("kind: switch", "kind: hypercube"), ("units: 132", "zzz: 132")):
        with pytest.raises(ClusterError) as caught:
            parse_cluster(text(change))
        assert caught.value.instead is None and "instead" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "place", "why"),
    [
        (text()[:300], "line 18, column 8", "the text ends too early"),
        (text(("  name: h100-sxm", "\tname: h100-sxm")), "line 3, column 1", "a tab"),
        ("a: b: c", "line 1, column 5", "mapping values are not allowed here"),
        ("\0", "broken.yaml;", "characters"),
        ("- 1", "broken.yaml: [1];", "a mapping with name"),
    ],
)
def test_text_that_is_no_cluster_is_located_in_one_line(
    tmp_path: Path, content: str, place: str, why: str
) -> None:
    (tmp_path / "broken.yaml").write_text(content, encoding="utf-8")
    with pytest.raises(ClusterError) as caught:
        load_cluster(tmp_path / "broken.yaml")
    said = str(caught.value)
    assert "broken.yaml" in said and place in said and why in said
    assert "\n" not in said and "\\n" not in said and "unicode string" not in said


@pytest.mark.parametrize("content", ["", "[1, 2]", "h100"])
def test_what_is_no_mapping_is_refused(content: str) -> None:
    with pytest.raises(ClusterError, match="a mapping"):
        parse_cluster(content)


def test_numbers_may_be_written_as_people_do() -> None:
    """YAML 1.1 reads 50e9 as text; it is a number all the same."""
    assert parse_cluster(text(("bytes_s: 5.0e+10", "bytes_s: 50e9"))) == preset("h100", 16)


def test_load_takes_files_and_names(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text(), encoding="utf-8")
    assert load_cluster(path) == load_cluster("h100", 16) == preset("h100", 16)
    assert load_cluster(str(path), 8).num_devices == 8


@pytest.mark.parametrize("name", ["nofile.yaml", "folder/nofile"])
def test_a_missing_file_is_said_to_be_one(name: str) -> None:
    with pytest.raises(ClusterError, match="No such file"):
        load_cluster(name)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ClusterError, match="not text"):
        load_cluster(path)
