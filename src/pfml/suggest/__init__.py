"""What to train a folder of images with, and why."""
