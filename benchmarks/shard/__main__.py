"""`python -m benchmarks.shard [--parts A B] [--rows TEXT ...] [--quick]`: measure, print, write."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks.record import Report, Table
from benchmarks.shard import blocks, overhead, planning, training
from benchmarks.shard.block import LARGE, SMALL
from benchmarks.shard.rows import ROWS


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shard", description=__doc__)
    parser.add_argument("--rows", nargs="*", default=[], help="only rows whose name has this text")
    parser.add_argument("--parts", nargs="*", default=list("ABCD"), choices=list("ABCD"))
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds; prints only")
    return parser.parse_args(arguments)


def chosen(names: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Names that hold any of the wanted texts; all of them when none is given."""
    return [name for name in names if not wanted or any(text in name for text in wanted)]


def main() -> None:
    options = parse()
    tables: list[Table] = []
    raw: dict[str, Any] = {}

    def add(table: Table, samples: dict[str, Any]) -> None:
        print(table.markdown(), flush=True)
        tables.append(table)
        raw.update(samples)

    if "A" in options.parts:
        names = chosen([row.name for row in ROWS], options.rows)
        sizes = [(SMALL, 3, 20)] if options.quick else [(SMALL, 15, 40), (LARGE, 12, 6)]
        for size, rounds, steps in sizes:
            add(*blocks.block_table(names, size, rounds, steps))
    if "B" in options.parts:
        num_layers, rounds = (2, 2) if options.quick else (8, 7)
        for llama_size, all_names in training.experiments(num_layers):
            if names := chosen(all_names, options.rows):
                add(*training.training_table(names, llama_size, rounds))
    if "C" in options.parts:
        add(*planning.planning_table((2,) if options.quick else (2, 8, 32)))
    if "D" in options.parts:
        names = chosen(list(overhead.ROWS), options.rows)
        if names:
            add(*overhead.overhead_table(names, rounds=3 if options.quick else 9))
    report = Report(
        name="shard",
        title="HyperShard against its peers",
        tables=tuple(tables),
        packages=("torch", "transformers", "numpy"),
        raw=raw,
    )
    if options.quick or options.rows or sorted(options.parts) != list("ABCD"):
        print("part of the benchmark: results/ is left as it was")
    else:
        print(f"written to {report.write()}")


if __name__ == "__main__":
    main()
