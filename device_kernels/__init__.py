"""Kernels of attention and experts for TPU and GPU, behind one adapter (adapter.py)."""
