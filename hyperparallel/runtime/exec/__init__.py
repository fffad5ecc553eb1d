"""One rank's program made callable: as generated code, compiled, or on virtual ranks."""
