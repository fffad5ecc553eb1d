"""From a model and a machine to the best strategies, with reasons: the planner."""
