"""The methods that can be trained by name: `METHODS`, one visible table.

How a method is trained: `pfml.runs.recipes`. How it was published: the files of `recipes/`.
"""

from pfml.methods.loss_config import LossConfig, create_loss, is_untrained, method_of
from pfml.methods.method import Method
from pfml.methods.recipe import Recipe
from pfml.methods.table import METHODS

__all__ = ["METHODS", "LossConfig", "Method", "Recipe", "create_loss", "is_untrained", "method_of"]
