"""The processes of a job: launch, workers, and where each of them stands."""
