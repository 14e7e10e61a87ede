"""Infrastructure of runs: settings, start, signals, exit codes, directories, locks, resume."""
