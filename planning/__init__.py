"""Capacity planning: cost by tracing, search, compilers without devices, reports."""
