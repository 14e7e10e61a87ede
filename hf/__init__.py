"""Hugging Face names, layouts and files."""
