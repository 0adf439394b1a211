"""Proposition 1 and Corollary 1 of the paper, checked on random points and plotted."""
