"""Images of different sizes: padded into one tensor, with masks that say what is image."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from batch_inference.batcher import Batcher

TILE = 16  # pixels: images whose sides round up to the same multiples share a batch


class ImageBatcher(Batcher):
    """predict(image): uint8 [3, height, width]  ->  predict_batch(images [n, 3, H, W], masks [n, 1, H, W])."""

    borrows = True  # batch copies each image to its place, so it needs no copy before that

    def batch(self, requests):
        images = [image for (image,) in requests]
        height = max(image.shape[1] for image in images)
        width = max(image.shape[2] for image in images)
        padded = np.zeros((len(images), 3, height, width), np.float32)
        masks = np.zeros((len(images), 1, height, width), np.float32)
        for row, image in enumerate(images):
            _, h, w = image.shape
            padded[row, :, :h, :w] = image
            masks[row, :, :h, :w] = 1
        return (padded, masks), None

    def unbatch(self, batched_response, context):
        return list(batched_response)  # one row per image

    def kind(self, request):  # only images of about one size share a batch: little is padded
        (image,) = request
        if image.ndim != 3 or image.shape[0] != 3 or image.dtype != np.uint8:
            raise ValueError(f"an image must be uint8 [3, height, width], got {image.dtype} {list(image.shape)}")
        return tuple(-(-side // TILE) for side in image.shape[1:])

    def size(self, request):  # max_batch_size counts pixels, padded ones included
        rows, columns = self.kind(request)
        return rows * columns * TILE * TILE


class ImageModel:
    """Two convolutions and the mean over the image: [n, 16]. What is no image must not count, at any layer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.first = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.second = torch.nn.Conv2d(8, 16, 3, padding=1)

    @torch.inference_mode()
    def predict_batch(self, images: Any, masks: Any) -> Any:
        x, mask = torch.from_numpy(images) / 255, torch.from_numpy(masks)
        x = torch.relu(self.first(x)) * mask  # without it, the bias would make something of the padding
        x = torch.relu(self.second(x)) * mask
        return (x.sum(dim=(2, 3)) / mask.sum(dim=(2, 3))).numpy()
