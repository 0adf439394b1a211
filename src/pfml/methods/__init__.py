"""The methods that can be trained by name: `METHODS`, one visible table.

How a method is trained: `pfml.runs.recipes`. How it was published: `pfml.methods.published`.
"""

from pfml.methods.method import Method, Recipe
from pfml.methods.table import METHODS, LossConfig, create_loss, is_untrained, method_of

__all__ = ["METHODS", "LossConfig", "Method", "Recipe", "create_loss", "is_untrained", "method_of"]
