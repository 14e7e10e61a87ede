"""One file per benchmark: python benchmark.py NAME."""
