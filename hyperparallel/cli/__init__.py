"""The command line: `hyperparallel train | plan | show | doctor`, one file per command."""
