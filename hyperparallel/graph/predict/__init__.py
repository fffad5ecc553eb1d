"""A program as instructions for the simulator, and a step that never ran on its clock."""
