"""What a call of a parallelized module does before its program, made quick."""
