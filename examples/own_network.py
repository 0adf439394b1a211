"""A network, a loss and images of your own: what `pfml.train` needs of each.

python examples/own_network.py
"""

import torch
from torch import nn

import pfml
from pfml.data import Augmentation, draw_glyphs


class Network(nn.Module):
    """Maps images (B, 3, H, W) to vectors (B, F)."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 32, 5, stride=2), nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2), nn.ReLU(),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        )  # fmt: skip

    def forward(self, images):
        return self.layers(images)


class CenterLoss(nn.Module):
    """Takes unit vectors and labels from 0 on, returns a scalar; its parameters train with `optimizer.proxy_lr`."""

    def __init__(self, num_classes, embedding_dim):
        super().__init__()
        self.centers = nn.Parameter(torch.randn(num_classes, embedding_dim))

    def forward(self, embeddings, labels):
        distances = torch.cdist(embeddings, nn.functional.normalize(self.centers))
        return nn.functional.cross_entropy(-8 * distances, labels)

    def proxy_points(self):
        """Optional: with (C, M, D) points, `pfml audit` and the report know the field of the classes."""
        return nn.functional.normalize(self.centers)[:, None]


# Any torch Dataset of (image, label), a list of (path, label), or a split of Hugging Face datasets.
glyphs = draw_glyphs("ABCDEFGHKLMNPRST", copies=1)
dataset = [(image, glyphs.class_names[label]) for image, label in zip(glyphs.images, glyphs.labels, strict=True)]
data = pfml.load_data(dataset, split="classes")  # half of the classes are unseen in training

embedder = pfml.Embedder.wrap(Network(), pfml.Preprocessing(resize=32, crop=32), embedding_dim=32)
loss = CenterLoss(data.train.num_classes, embedder.embedding_dim)
config = pfml.TrainConfig(
    epochs=5,
    batch=pfml.BatchConfig(size=32, samples_per_class=4),
    optimizer=pfml.OptimizerConfig("adamw", lr=3e-3, proxy_lr=1e-2),
    augmentation=Augmentation(random_crop=False, flip=0),  # for letters; photographs take the default
)
results = pfml.train(data, embedder, config, loss=loss, monitor=pfml.ProgressMonitor())
print(f"R@1 on unseen classes: {results['last']['test']['recall_at_1']:.3f}, in {results['run']}")

again = pfml.load_embedder(results["run"], network=Network())  # no file makes pfml run your code: you hand it over
print(again.encode(glyphs.images[:2]).shape)
