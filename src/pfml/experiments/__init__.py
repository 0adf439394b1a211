"""Experiments on the paper's claims: each module runs one and returns its results as frozen dataclasses."""
