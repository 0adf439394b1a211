"""More than crops and flips: color jitter, grayscale, rotation, RandAugment, random erasing.

python examples/augmentation.py              # writes augmentation.png, what training sees
"""

from torchvision.utils import save_image

from pfml.data import Augmentation, draw_glyphs
from pfml.data.crop_transforms import transform_crops

augmentation = Augmentation(color_jitter=(0.4, 0.4, 0.4, 0.1), grayscale=0.2, rotation=15, rand_augment=1, erasing=0.25)
crops = draw_glyphs("ABCDEFGH", copies=1).images[::16].float() / 255
views = [crops, *(transform_crops(crops.clone(), augmentation, seed=0, step=step) for step in range(5))]
save_image([crop for view in views for crop in view], "augmentation.png", nrow=len(crops))
print("augmentation.png: the crops in the first row, then what five steps of training would see")
print("in a run: pfml.TrainConfig(augmentation=augmentation), or --augmentation.rotation 15 ...")
