"""Proposition 1 and Corollary 1 of the paper, checked and drawn."""
