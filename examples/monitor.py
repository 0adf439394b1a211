"""Something of your own that hears of a run: here it stops one that no longer improves.

python examples/monitor.py
"""

import pfml
from pfml.data import draw_glyphs


class StopWhenItStalls(pfml.Monitor):
    """Ends a run after so many evaluations without a better R@1; `pfml.train(..., resume=True)` would go on."""

    def __init__(self, patience):
        self.patience, self.best, self.waited = patience, 0.0, 0

    def evaluated(self, entry):
        recall = entry["test"]["recall_at_1"]
        self.waited = 0 if recall > self.best else self.waited + 1
        self.best = max(self.best, recall)
        if self.waited >= self.patience:
            raise StopIteration(f"no better than {self.best:.3f} for {self.patience} evaluations")


data = pfml.load_data(draw_glyphs("ABCDEFGHKLMNPRST", copies=1))
embedder = pfml.create_embedder("convnet", embedding_dim=32)
config = pfml.TrainConfig(
    epochs=30,
    batch=pfml.BatchConfig(size=32),
    loss=pfml.LossConfig("proxy-anchor"),
    optimizer=pfml.OptimizerConfig("adamw", lr=3e-3),
)
try:
    pfml.train(data, embedder, config, monitor=[pfml.ProgressMonitor(), StopWhenItStalls(2)])
except StopIteration as reason:
    print(f"stopped: {reason}")
