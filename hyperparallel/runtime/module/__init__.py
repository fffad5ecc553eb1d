"""The front doors: a parallelized module, a whole training step, a certificate."""
