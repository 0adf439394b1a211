"""Train a part of a network: a head on cached features, adapters (LoRA), early layers more slowly.

pip install 'pfml[lora]'
python examples/parts_of_a_network.py
"""

import time

import pfml
from pfml.data import draw_glyphs

data = pfml.load_data(draw_glyphs("ABCDEFGH", copies=1))
adamw = pfml.OptimizerConfig("adamw", lr=1e-3)
ways = {
    "everything": {},
    "the head, on features that are computed once": {"freeze": "trunk"},
    "adapters of rank 4 and the head": {"lora": 4},
    "each layer at 3/4 of the rate of the next": {
        "optimizer": pfml.OptimizerConfig("adamw", lr=1e-3, layer_decay=0.75)
    },
}
for name, options in ways.items():
    embedder = pfml.create_embedder("test_vit", weights="none", embedding_dim=32, image_size=32)  # a small transformer
    values = {"epochs": 2, "optimizer": adamw, "batch": pfml.BatchConfig(size=16), "warm_up_epochs": 0, **options}
    start = time.perf_counter()
    results = pfml.train(data, embedder, pfml.TrainConfig(**values))
    recall = results["last"]["test"]["recall_at_1"]
    print(f"{name}: R@1 {recall:.3f}, {time.perf_counter() - start:.1f} s")
