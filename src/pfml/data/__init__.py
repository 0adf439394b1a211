"""Images and labels: data sets, splits, label noise, and the way of an image into a batch."""

from pfml.data.datasets import BENCHMARKS, DATASETS, load_data
from pfml.data.decoding import check_data, check_images
from pfml.data.glyphs import draw_glyphs, read_glyphs
from pfml.data.image_set import ImageSet, RetrievalData, SeenClassError
from pfml.data.image_source import open_images
from pfml.data.label_noise import Corruption, LabelNoise, corrupt
from pfml.data.own_images import without_unreadable
from pfml.data.preprocessing import Augmentation, Preprocessing
from pfml.data.readers.folder import read_folder
from pfml.data.readers.table import read_table
from pfml.data.sampling import BalancedBatches, NeighborBatches, RandomBatches
from pfml.data.splits import with_validation, zero_shot
from pfml.data.windows import Windows

__all__ = [
    "BENCHMARKS",
    "DATASETS",
    "Augmentation",
    "BalancedBatches",
    "Corruption",
    "ImageSet",
    "LabelNoise",
    "NeighborBatches",
    "Preprocessing",
    "RandomBatches",
    "RetrievalData",
    "SeenClassError",
    "Windows",
    "check_data",
    "check_images",
    "corrupt",
    "draw_glyphs",
    "load_data",
    "open_images",
    "read_folder",
    "read_glyphs",
    "read_table",
    "with_validation",
    "without_unreadable",
    "zero_shot",
]
