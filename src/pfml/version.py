"""The version of this package: read by the build (pyproject.toml) and written into exported files and pages."""

__all__ = ["__version__"]

__version__ = "0.1.0"
