"""A run on disk: its configuration, its folder, its results, its model card."""
