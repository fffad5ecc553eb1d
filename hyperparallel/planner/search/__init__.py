"""Which strategies there are for a job, and which are best in closed form."""
