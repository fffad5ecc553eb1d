"""One strategy in detail: its stages and layers, and its step on the clock of the simulator."""
