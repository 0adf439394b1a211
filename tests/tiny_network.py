"""A network of a few hundred weights, for files that lie in the repository."""

from torch import Tensor, nn

from pfml.data import Preprocessing
from pfml.models.backbone import Backbone
from pfml.models.backbone_table import SpecialBackbone

HALF = (0.5, 0.5, 0.5)


class TinyNet(Backbone):
    """Two convolutions."""

    num_features = 12

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 6, 5, stride=3), nn.ReLU(), nn.Conv2d(6, 12, 3, stride=2), nn.BatchNorm2d(12), nn.ReLU()
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


#: To be put into `BACKBONES` as "tiny".
TINY = SpecialBackbone(
    lambda image_size: TinyNet(), Preprocessing(resize=32, crop=32, mean=HALF, std=HALF), default_weights="none"
)
