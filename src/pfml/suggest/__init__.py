"""What to train a folder of images with, and why; and whether training has helped."""

from pfml.suggest.suggestion import Suggestion, suggest

__all__ = ["Suggestion", "suggest"]
