"""Exports of a run: an ONNX file, a bundle that one call loads, a collection of a vector database.

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

The command is `pfml export`; see docs/EXPORT.md.
"""

from typing import TYPE_CHECKING

from pfml.lazy import lazy_names

if TYPE_CHECKING:
    from pfml.export.bundle import Bundle, export_bundle, load_bundle
    from pfml.export.onnx import OnnxDifferenceError, OnnxExport, export_onnx
    from pfml.export.vector_databases import VECTOR_DATABASES, Collection, IndexExport, VectorDatabase, export_index
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "pfml.export.bundle": ("Bundle", "export_bundle", "load_bundle"),
            "pfml.export.onnx": ("OnnxDifferenceError", "OnnxExport", "export_onnx"),
            "pfml.export.vector_databases": (
                "VECTOR_DATABASES",
                "Collection",
                "IndexExport",
                "VectorDatabase",
                "export_index",
            ),
        },
    )

__all__ = [
    "VECTOR_DATABASES",
    "Bundle",
    "Collection",
    "IndexExport",
    "OnnxDifferenceError",
    "OnnxExport",
    "VectorDatabase",
    "export_bundle",
    "export_index",
    "export_onnx",
    "load_bundle",
]
