"""Local forms: what one rank calls for an op, given its pieces of the cut factors."""
