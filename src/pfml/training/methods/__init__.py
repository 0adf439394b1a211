"""The methods that can be trained by name: `METHODS`, one visible table.

How a method is trained: `pfml.training.methods.recipes`. How it was published: `pfml.training.methods.published`.
"""

from pfml.training.methods.choice import LossConfig, create_loss
from pfml.training.methods.method import Method, Recipe
from pfml.training.methods.table import METHODS

__all__ = ["METHODS", "LossConfig", "Method", "Recipe", "create_loss"]
