"""What `make imports` and `make size` run: checks of the source that no linter has."""
