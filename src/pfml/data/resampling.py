"""The crops of `Windows` as floats: two executions of one geometry, image by image or a batch at once.

`resample` adds the few pixels that have a weight in a row or column of each image, which is fast on a CPU.
`resample_batch` gathers the windows of many images of different sizes into one padded tensor and applies the weights of
`pfml.data.windows` as two batched products, which is fast on a GPU: it neither loops over images nor waits for the
device. Where Triton is installed, `pfml.data.fused_crops` is a third execution, for GPUs only and faster there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from pfml.data.pinned_memory import to_device
from pfml.data.windows import INTERPOLATIONS, Windows
from pfml.precision import full_precision

__all__ = ["PixelBuffer", "resample", "resample_batch"]

#: padded source values that `resample_batch` gathers at a time (13 bytes each while it works)
CHUNK_VALUES = 2**24


@dataclass(frozen=True, eq=False)
class PixelBuffer:
    """Images of any sizes in one flat buffer: image i is (3, height, width) from `offsets[i]` on.

    Args:
        data: (total,) uint8, on any device.
        offsets: (N,) int64, on the CPU.
        sizes: (N, 2) int64, height and width, on the CPU.
    """

    data: Tensor
    offsets: Tensor
    sizes: Tensor

    @classmethod
    def of_pixels(cls, pixels: Tensor) -> PixelBuffer:
        """The buffer of a (N, 3, height, width) uint8 tensor, without a copy if it is contiguous."""
        count, _, height, width = pixels.shape
        sizes = torch.tensor([[height, width]]).expand(count, 2)
        return cls(pixels.contiguous().view(-1), torch.arange(count) * (3 * height * width), sizes)

    @classmethod
    def of_images(cls, images: list[Tensor]) -> PixelBuffer:
        """The buffer of images (3, height, width) uint8; the list is emptied, so that they are in memory once."""
        sizes = torch.tensor([image.shape[1:] for image in images], dtype=torch.int64).reshape(-1, 2)
        lengths = 3 * sizes.prod(1)
        buffer = cls(torch.empty(int(lengths.sum()), dtype=torch.uint8), lengths.cumsum(0) - lengths, sizes)
        for index in reversed(range(len(images))):
            buffer.image(index).copy_(images.pop())
        return buffer

    def __len__(self) -> int:
        return len(self.offsets)

    def image(self, index: int) -> Tensor:
        """Image `index` as a view (3, height, width)."""
        height, width = self.sizes[index].tolist()
        offset = int(self.offsets[index])
        return self.data[offset : offset + 3 * height * width].view(3, height, width)

    def to(self, device: torch.device | str) -> PixelBuffer:
        """The same pixels on `device`."""
        return replace(self, data=self.data.to(device))


def resample(image_of: Callable[[int], Tensor], windows: Windows, *, pool: Executor | None = None) -> Tensor:
    """All crops of `windows`, (B, 3, size, size) float32 in [0, 1], image by image on the CPU.

    Args:
        image_of: Gives image `index` as (3, height, width) uint8.
        windows: Where the crops lie.
        pool: Threads to share the images among.
    """
    out = torch.empty(len(windows), 3, windows.size, windows.size)

    def fill(row: int) -> None:
        window = windows.rows(slice(row, row + 1))
        _crop(image_of(int(window.indices)), window, out[row])

    for _ in (map if pool is None else pool.map)(fill, range(len(windows))):
        pass
    return out.clamp_(0.0, 1.0) if windows.interpolation == "bicubic" else out


def _crop(image: Tensor, window: Windows, out: Tensor) -> None:
    """Write the one crop of `window` to `out`, (3, size, size), without clamping.

    Few source pixels have a weight in an output pixel: first rows and then columns are weighted sums of a few others.
    """
    size = window.size
    if window.is_copy:
        top, left = window.start[0].long().tolist()
        crop = image[:, top : top + size, left : left + size]
        out.copy_(crop.flip(-1) if bool(window.flipped) else crop).div_(255.0)
        return
    first, end = window.footprint()
    (top, left), (bottom, right) = first[0].tolist(), end[0].tolist()
    height, width = bottom - top, right - left
    region = torch.empty(height, 3, width).copy_(image[:, top:bottom, left:right].transpose(0, 1))
    source, weight = _taps(window, torch.device("cpu"))
    # what lies beyond the footprint has no weight, and is not there to be read
    source = (source - first[:, :, None, None]).clamp_(min=0).minimum((end - first - 1)[:, :, None, None])
    (rows, columns), (of_rows, of_columns) = source[0], weight[0]
    low = F.embedding_bag(rows, region.view(height, 3 * width), per_sample_weights=of_rows, mode="sum")
    turned = low.view(size * 3, width).t().contiguous()
    high = F.embedding_bag(columns, turned, per_sample_weights=of_columns, mode="sum")  # (size, size * 3)
    torch.div(high.view(size, size, 3).permute(2, 1, 0), 255.0, out=out)


def resample_batch(pixels: PixelBuffer, windows: Windows, *, chunk_values: int = CHUNK_VALUES) -> Tensor:
    """All crops of `windows`, (B, 3, size, size) float32 in [0, 1] on the device of `pixels`.

    No loop over images and no wait for the device: crops of similar extent are gathered together, at most
    `chunk_values` padded source values at a time (or one image), and resampled by two products.
    """
    if windows.is_copy:
        return _copy(pixels, windows)
    out = pixels.data.new_empty((len(windows), 3, windows.size, windows.size), dtype=torch.float32)
    first, end = windows.footprint()
    with full_precision(out.device):
        for chosen in _chunks(end - first, chunk_values):
            part = windows.rows(chosen)
            crops = _weigh_one(pixels.image(int(part.indices)), part) if len(part) == 1 else _weigh(pixels, part)
            out.index_copy_(0, to_device(chosen, out.device), crops)
    return out


def _chunks(shapes: Tensor, chunk_values: int) -> Iterator[Tensor]:
    """Rows by area, as many at a time as fit when padded to the largest height and width among them."""
    order = shapes.prod(1).argsort(stable=True)
    while len(order):
        padded = shapes[order].cummax(0).values.prod(1) * 3 * torch.arange(1, len(order) + 1)
        count = max(int((padded <= chunk_values).sum()), 1)
        yield order[:count]
        order = order[count:]


def _copy(pixels: PixelBuffer, windows: Windows) -> Tensor:
    """Crops that need no interpolation: indexing alone."""
    size, device = windows.size, pixels.data.device
    indices, corner = windows.indices, windows.start.to(torch.int64)
    sizes = pixels.sizes[indices]
    length = 3 * size * size
    if bool((sizes == size).all()) and bool((pixels.offsets[indices] == indices * length).all()):
        whole = pixels.data[: len(pixels.data) // length * length]
        crops = whole.view(-1, 3, size, size).index_select(0, to_device(indices, device))
        mirrored = to_device(windows.flipped.nonzero()[:, 0], device)
        crops.index_copy_(0, mirrored, crops.index_select(0, mirrored).flip(-1))
        return crops.float().div_(255.0)
    axis = torch.arange(size)
    columns = torch.where(windows.flipped[:, None], size - 1 - axis, axis) + corner[:, 1:]  # (B, size)
    rows = (corner[:, :1] + axis) * sizes[:, 1:]  # (B, size)
    planes = pixels.offsets[indices, None] + torch.arange(3) * sizes.prod(1, keepdim=True)  # (B, 3)
    planes, rows, columns = (to_device(part, device) for part in (planes, rows, columns))
    return (
        pixels.data[planes[:, :, None, None] + rows[:, None, :, None] + columns[:, None, None, :]].float().div_(255.0)
    )


def _weigh_one(image: Tensor, windows: Windows) -> Tensor:
    """The one crop of `windows` by its weights, without padding or gathering, (1, 3, size, size)."""
    first, end = windows.footprint()
    (top, left), (bottom, right) = first[0].tolist(), end[0].tolist()
    weights = _weights(windows, first, (bottom - top, right - left), image.device)
    sources = image[None, :, top:bottom, left:right].float().transpose(1, 2)
    return _products(sources, *weights, windows.interpolation)


def _weigh(pixels: PixelBuffer, windows: Windows) -> Tensor:
    """All crops of `windows` at once, their source pixels gathered into one padded tensor."""
    device = pixels.data.device
    first, end = windows.footprint()
    height, width = (end - first).amax(0).tolist()
    sizes = pixels.sizes[windows.indices]
    # one copy to the device for all of the geometry; the last valid position keeps the padding inside the image
    parts = [pixels.offsets[windows.indices, None], sizes.prod(1, keepdim=True), sizes[:, 1:], first, end - 1]
    geometry = to_device(torch.cat(parts, dim=1), device)[:, :, None]
    offset, area, image_width, top, left, bottom, right = geometry.unbind(1)  # each (B, 1)
    rows = torch.minimum(top + torch.arange(height, device=device), bottom) * image_width + offset  # (B, height)
    columns = torch.minimum(left + torch.arange(width, device=device), right)  # (B, width)
    planes = torch.arange(3, device=device) * area  # (B, 3)
    rows = rows[:, :, None] + planes[:, None, :]  # (B, height, 3)
    sources = pixels.data[rows[..., None] + columns[:, None, None, :]].float()  # (B, height, 3, width)
    return _products(sources, *_weights(windows, first, (height, width), device), windows.interpolation)


def _weights(windows: Windows, first: Tensor, lengths: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """The weights w_kj of rows (B, size, height) and of columns (B, size, width), for j counted from `first`."""
    source, weight = _taps(windows, device)
    column = source - to_device(first, device)[:, :, None, None]
    axes = []
    for axis, length in enumerate(lengths):
        # one column more on either side takes the pixels that are out of bounds, whose weight is zero
        padded = weight.new_zeros(len(windows), windows.size, length + 2)
        padded.scatter_(2, column[:, axis].clamp(-1, length) + 1, weight[:, axis])
        axes.append(padded[:, :, 1:-1])
    return axes[0], axes[1]


def _taps(windows: Windows, device: torch.device) -> tuple[Tensor, Tensor]:
    """The source pixels near each output pixel, (B, 2, size, few) int64, and their weights, float32; rows and columns.

    Weights are computed in float64, and are zero where a pixel is out of bounds.
    """
    size, radius = windows.size, INTERPOLATIONS[windows.interpolation]
    flipped = torch.stack([torch.zeros_like(windows.flipped), windows.flipped], dim=1)
    parts = [windows.start, windows.extent, windows.lower, windows.upper, flipped]
    geometry = to_device(torch.cat(parts, dim=1), device).view(-1, 5, 2, 1)  # float64
    start, extent, lower, upper, mirrored = geometry.unbind(1)  # each (B, 2, 1)
    step = extent / size
    stretch = step.clamp(min=1.0)
    ticks = torch.arange(size, device=device, dtype=torch.float64)
    center = start + (torch.where(mirrored > 0, size - 1 - ticks, ticks) + 0.5) * step  # (B, 2, size)
    nearest = (center - radius * stretch - 0.5).ceil()  # the first pixel within the filter
    widest = max(float(windows.extent.max()) / size, 1.0)
    reached = torch.arange(int(2 * radius * widest) + 1, device=device)
    source = nearest[..., None] + reached  # (B, 2, size, reached)
    distance = (source + 0.5 - center[..., None]) / stretch[..., None]
    weight = _filter(distance.abs(), windows.interpolation)
    weight = weight * ((source >= lower[..., None]) & (source < upper[..., None]))
    return source.long(), (weight / weight.sum(-1, keepdim=True)).float()


def _filter(distance: Tensor, interpolation: str) -> Tensor:
    """The triangle, or Keys' cubic with a = -1/2."""
    if interpolation == "bilinear":
        return (1.0 - distance).clamp(min=0.0)
    near = (1.5 * distance - 2.5) * distance * distance + 1.0
    far = ((-0.5 * distance + 2.5) * distance - 4.0) * distance + 2.0
    return torch.where(distance < 1.0, near, far * (distance < 2.0))


def _products(sources: Tensor, row_weights: Tensor, column_weights: Tensor, interpolation: str) -> Tensor:
    """(B, height, 3, width) -> (B, 3, size, size) in [0, 1]: rows first, then columns."""
    count, height, _, width = sources.shape
    size = row_weights.shape[1]
    low = torch.bmm(row_weights, sources.reshape(count, height, 3 * width))  # (B, size, 3 * width)
    crops = torch.bmm(low.view(count, size * 3, width), column_weights.transpose(1, 2)).div_(255.0)
    crops = crops.clamp_(0.0, 1.0) if interpolation == "bicubic" else crops
    return crops.view(count, size, 3, size).transpose(1, 2)
