"""The numbers of a run in Weights & Biases, MLflow or trackio.

pip install 'pfml[mlflow]'
python examples/trackers.py mlflow           # wandb: WANDB_MODE=offline keeps it on this machine
"""

import sys

import pfml
from pfml.data import draw_glyphs

data = pfml.load_data(draw_glyphs("ABCDEFGHKLMNPRST", copies=1))
embedder = pfml.create_embedder("convnet", embedding_dim=32)
config = pfml.TrainConfig(
    epochs=2,
    batch=pfml.BatchConfig(size=32),
    optimizer=pfml.OptimizerConfig("adamw", lr=1e-3),
    log_every=1,
    trackers=tuple(sys.argv[1:]) or ("tensorboard",),
)
results = pfml.train(data, embedder, config, monitor=pfml.ProgressMonitor())
print(f"{results['run']}: log.jsonl, and the same in {', '.join(config.trackers)}")
