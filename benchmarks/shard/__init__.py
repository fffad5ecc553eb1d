"""HyperShard against hand-written, DTensor and FSDP2 programs: `python -m benchmarks.shard`."""
