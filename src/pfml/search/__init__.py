"""Search: an index of images that belongs to a model, the most likely class of a query, and whether it is known.

Example:
    >>> import tempfile, torch
    >>> from pfml.search import ImageIndex, ModelIdentity
    >>> model = ModelIdentity(digest="0" * 64, description="vectors of my own")
    >>> index = ImageIndex.create(tempfile.mkdtemp() + "/index", model, dimension=2)
    >>> index.add(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), ["cat.jpg", "dog.jpg"], ["cat", "dog"], model=model)
    (0, 1)
    >>> [hit] = index.search(torch.tensor([[3.0, 4.0]]), k=1, model=model)[0]
    >>> hit.path, hit.class_name, round(hit.distance, 3)
    ('dog.jpg', 'dog', 0.632)

With images, `ModelIdentity.of(embedder)` names the model, `update_index` embeds a folder or a CSV, and `calibrate`
finds the threshold that `verdict_of` applies. `embed_collection` embeds images that are too many for memory or for one
machine. The commands are `pfml index`, `pfml search`, `pfml calibrate` and `pfml embed`; docs/SEARCH.md tells the rest.
"""

from pfml.search.calibration import calibrate, calibrate_known, calibrate_points
from pfml.search.collection import CollectionUpdate, ImageShard, embed_collection
from pfml.search.edits import Edit, Edits
from pfml.search.identity import ModelIdentity, OtherModelError
from pfml.search.index import Entry, Hit, ImageIndex, Points
from pfml.search.listing import Listing, list_images
from pfml.search.opened import OpenedRun, open_run
from pfml.search.queries import Query, search_queries
from pfml.search.threshold import Rate, Threshold
from pfml.search.update import Update, update_index
from pfml.search.verdict import Verdict, verdict_of
from pfml.search.where import WhereError
from pfml.storage.lock import LockedError

__all__ = [
    "CollectionUpdate",
    "Edit",
    "Edits",
    "Entry",
    "Hit",
    "ImageIndex",
    "ImageShard",
    "Listing",
    "LockedError",
    "ModelIdentity",
    "OpenedRun",
    "OtherModelError",
    "Points",
    "Query",
    "Rate",
    "Threshold",
    "Update",
    "Verdict",
    "WhereError",
    "calibrate",
    "calibrate_known",
    "calibrate_points",
    "embed_collection",
    "list_images",
    "open_run",
    "search_queries",
    "update_index",
    "verdict_of",
]
