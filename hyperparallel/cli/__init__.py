"""The command line: `hyperparallel train | plan | sweep | show | compare | doctor`, one file per command."""
