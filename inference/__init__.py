"""Cached decoding, sampling, multiple-choice scoring, the lm-evaluation-harness adapter."""
