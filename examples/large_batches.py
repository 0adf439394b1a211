"""A batch that is larger than memory: gradient caching gives the step of the whole batch, in mini-batches.

python examples/large_batches.py
"""

from copy import deepcopy

import pfml
from pfml.data import draw_glyphs

embedder = pfml.create_embedder("convnet", embedding_dim=32)
data = pfml.load_data(draw_glyphs("ABCDEFGHKLMNPRST", copies=1))
for mini_batch_size in (None, 16):
    config = pfml.TrainConfig(
        epochs=1,
        batch=pfml.BatchConfig(size=64, samples_per_class=8, mini_batch_size=mini_batch_size),
        batch_norm="freeze",  # its statistics would be those of a mini-batch
        loss=pfml.LossConfig("pfml-log", {"reduction": "points"}),
        optimizer=pfml.OptimizerConfig("sgd", lr=1e-3),
    )
    results = pfml.train(data, deepcopy(embedder), config)
    print(f"mini-batches of {mini_batch_size or 'all 64'}: mean loss {results['last']['loss']:.6f}")
