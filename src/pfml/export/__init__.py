"""A run handed on: as an ONNX file, as a bundle that one call loads, as a collection of a vector database.

Example:
    >>> from pfml.data import draw_glyphs
    >>> from pfml.models import create_embedder
    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> create_embedder("convnet", embedding_dim=8).save(folder + "/model")
    >>> export_bundle(folder + "/model", folder + "/bundle.zip")
    ('model', 'preprocessing')
    >>> load_bundle(folder + "/bundle.zip").encode(draw_glyphs("A", copies=1).images[:2]).shape
    torch.Size([2, 8])

The command is `pfml export`; docs/EXPORT.md has the whole story.
"""

from pfml.export.bundle import Bundle, load_bundle
from pfml.export.onnx import OnnxDifferenceError, OnnxExport, export_onnx
from pfml.export.pack import export_bundle
from pfml.export.qdrant import QdrantExport, export_qdrant

__all__ = [
    "Bundle",
    "OnnxDifferenceError",
    "OnnxExport",
    "QdrantExport",
    "export_bundle",
    "export_onnx",
    "export_qdrant",
    "load_bundle",
]
