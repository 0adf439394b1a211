"""Readers: one data set or layout, one file."""

from pfml.data.readers.cars import read_cars
from pfml.data.readers.cub import read_cub
from pfml.data.readers.folder import read_folder
from pfml.data.readers.in_shop import read_in_shop
from pfml.data.readers.sop import read_sop
from pfml.data.readers.table import read_table

__all__ = ["read_cars", "read_cub", "read_folder", "read_in_shop", "read_sop", "read_table"]
