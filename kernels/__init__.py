"""Attention kernels for TPU and GPU, behind one adapter (adapter.py)."""
