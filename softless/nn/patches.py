"""Patch embedding as one matrix product, which equals a convolution whose kernel tiles the picture.

    y[b, :, i, j] = W x[b, :, i p : i p + p, j p : j p + p] + bias

cuDNN would run it as a convolution, which is several times slower with few channels.
"""

from typing import Any, cast

import torch.nn.functional as F
from timm import layers
from timm.models import register_notrace_module
from torch import Tensor, nn


@register_notrace_module
class Patches(nn.Conv2d):
    """A convolution with stride = kernel size and no padding. Height and width must be multiples of the kernel size."""

    def forward(self, x: Tensor) -> Tensor:
        p, q = self.kernel_size
        b, c, h, w = x.shape
        x = x.reshape(b, c, h // p, p, w // q, q).permute(0, 2, 4, 1, 3, 5)
        x = x.reshape(b, h // p, w // q, c * p * q)
        return F.linear(x, self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)  # [B, dim, h / p, w / q]


class PatchEmbed(layers.PatchEmbed):
    """timm's PatchEmbed for images of any size, with `Patches` as its projection."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(None, *args, strict_img_size=False, dynamic_img_pad=True, **options)
        conv = cast(nn.Conv2d, self._modules["proj"])
        size = cast(tuple[int, int], conv.kernel_size)
        self.proj = Patches(conv.in_channels, conv.out_channels, size, size, bias=conv.bias is not None, device="meta")
        self.proj.weight, self.proj.bias = conv.weight, conv.bias
