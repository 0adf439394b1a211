"""Plots: curves, verification, the ladder, fields, maps, grids of images, and their theme."""
