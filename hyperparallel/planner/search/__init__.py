"""Which strategies there are for a job, which are best in closed form, and why not their neighbours."""
