"""Small models that are not ours, with random weights: those of timm and Hugging Face that `capture` is tested on.

A case makes a model and what to call it with.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import timm
import torch
import transformers
from torch import Tensor, nn

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


class Case(NamedTuple):
    model: nn.Module
    inputs: dict[str, Any]
    rows: Tensor | None = None  # which tokens are no padding [B, N]


def images(size: int = 32) -> Tensor:
    return torch.randn(2, 3, size, size, dtype=torch.float64)


def loud(model: nn.Module) -> nn.Module:
    """With weights large enough that attention is far from uniform, and no table that stays zero."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5 if parameter.ndim > 1 else 0.1)
    return model.double().eval()


def timms(name: str, fused: bool, **options: Any) -> Case:
    size = options.setdefault("img_size", 32)
    model = loud(timm.create_model(name, num_classes=5, **options))
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused
    return Case(model, {"x": images(size)})


def vit(fused: bool) -> Case:
    return timms("deit_tiny_patch16_224", fused, patch_size=8, embed_dim=32, depth=2, num_heads=4)


def distilled(fused: bool) -> Case:
    return timms("deit_tiny_distilled_patch16_224", fused, patch_size=8, embed_dim=32, depth=2, num_heads=4)


def swin(fused: bool) -> Case:
    sizes = {"patch_size": 2, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4), "window_size": 5}
    return timms("swin_tiny_patch4_window7_224", fused, **sizes)


def rotary(fused: bool) -> Case:
    return timms("vit_small_patch16_rope_224.naver_in1k", fused, patch_size=8, embed_dim=32, depth=2, num_heads=4)


def masked(padded: str) -> dict[str, Any]:
    ids, mask = torch.randint(1, 50, (3, 9)), torch.ones(3, 9, dtype=torch.long)
    if padded == "right":
        mask[1, 6:] = 0
    elif padded == "left":
        mask[1, :3] = 0
    return {"input_ids": ids} if padded == "none" else {"input_ids": ids, "attention_mask": mask}


def text(model: nn.Module, padded: str, **more: Any) -> Case:
    inputs = masked(padded)
    mask = inputs.get("attention_mask")
    return hugging_face(model, inputs | more, None if mask is None else mask.bool())


def hugging_face(model: nn.Module, inputs: dict[str, Any], rows: Tensor | None = None) -> Case:
    """Written out, their softmax is float32 whatever the model is, so the model is float32 too."""
    dtype = torch.float64 if model.config._attn_implementation == "sdpa" else torch.float32
    inputs = {name: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in inputs.items()}
    return Case(loud(model).to(dtype), inputs, rows)


def bert(fused: bool, padded: str = "right") -> Case:
    config = transformers.BertConfig(vocab_size=50, attn_implementation=implementation(fused), **SIZES)
    return text(transformers.BertModel(config), padded)


def llama(fused: bool, padded: str = "none") -> Case:
    """Rotated queries and keys, two key heads for four query heads, causal."""
    config = transformers.LlamaConfig(
        vocab_size=50, num_key_value_heads=2, attn_implementation=implementation(fused), **SIZES
    )
    return text(transformers.LlamaModel(config), padded, use_cache=False)


def hf_vit(fused: bool) -> Case:
    config = transformers.ViTConfig(image_size=32, patch_size=8, attn_implementation=implementation(fused), **SIZES)
    return hugging_face(transformers.ViTModel(config), {"pixel_values": images()})


def hf_swin(fused: bool) -> Case:
    sizes: dict[str, Any] = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]}
    config = transformers.SwinConfig(window_size=4, attn_implementation=implementation(fused), **sizes)
    return hugging_face(transformers.SwinModel(config), {"pixel_values": images()})


def implementation(fused: bool) -> str:
    return "sdpa" if fused else "eager"


CASES: dict[str, Callable[[bool], Case]] = {
    "timm ViT": vit,
    "timm DeiT, distilled": distilled,
    "timm Swin": swin,
    "timm ViT, rotary": rotary,
    "BERT": bert,
    "BERT, no padding": lambda fused: bert(fused, "none"),
    "Llama": llama,
    "Llama, padded right": lambda fused: llama(fused, "right"),
    "Llama, padded left": lambda fused: llama(fused, "left"),
    "Hugging Face ViT": hf_vit,
    "Hugging Face Swin": hf_swin,
}
