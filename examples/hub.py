"""A model on the Hugging Face Hub: up, and down again.

HF_TOKEN=... python examples/hub.py organization/name
"""

import sys

import pfml
from pfml.data import draw_glyphs

repository = sys.argv[1] if len(sys.argv) > 1 else "organization/name"
embedder = pfml.create_embedder("convnet", embedding_dim=32).eval()
name = embedder.push_to_hub(repository, private=True)
again = pfml.load_embedder(name)  # "hf-hub:organization/name", or "hf-hub:organization/name@revision"
images = draw_glyphs("AB", copies=1).images[:2]
print(f"{name}: equal embeddings: {bool((again.encode(images) == embedder.encode(images)).all())}")
