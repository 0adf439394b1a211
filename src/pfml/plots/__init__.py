"""Plots: curves, fields, maps, grids of images, and their theme."""
