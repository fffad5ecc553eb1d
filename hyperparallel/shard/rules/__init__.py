"""Sharding rules: how the dims of an op's inputs and outputs move together, one file for each kind of op."""
