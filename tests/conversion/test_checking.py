"""Mistakes in the data of a conversion are told in one sentence, before any work."""

import pytest
import timm
import torch
from torch import nn
from transformers import AutoModelForImageClassification, AutoModelForMaskedLM

import softless
from softless.conversion.pipeline import plan
from softless.errors import ArgumentError
from tests.conversion.test_convert import model_of
from tests.language.models import VOCABULARY, tokens

WORDS = tokens(24, 20)
PICTURES, CLASSES = torch.randn(24, 3, 32, 32), torch.arange(24) % 4


def text() -> nn.Module:
    return model_of("llama")


def masked() -> nn.Module:
    return model_of("bert", AutoModelForMaskedLM)


def timm_vit() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=4, depth=1)


def our_vit() -> nn.Module:
    return softless.create_model("deit_tiny", dims=32, depths=1, heads=2, patch_size=8, img_size=32, num_classes=4)


def hf_vit() -> nn.Module:
    return model_of("vit", AutoModelForImageClassification)


def labeled(pictures=PICTURES, labels=CLASSES):
    return {"pixel_values": pictures, "labels": labels}


WRONG = {
    "texts": (text, ["hello"] * 24, "data is text and must be a tensor .*: tokenize texts first"),
    "a list of lists": (text, WORDS.tolist(), "data is a list and must be a tensor of samples, or a dictionary"),
    "an empty dictionary": (text, {}, "data is empty, and must hold a tensor named input_ids"),
    "a list in a dictionary": (text, {"input_ids": [1, 2]}, r"'input_ids' in data is \[1, 2\] and must be a tensor"),
    "one dimension": (text, WORDS[0], r"input_ids has shape \[20\] and must be \[samples, tokens\]"),
    "another key for words": (text, {"ids": WORDS}, "data has ids, and LlamaForCausalLM needs input_ids"),
    "a short mask": (
        text, {"input_ids": WORDS, "attention_mask": torch.ones(24, 19)},
        r"attention_mask has shape \[24, 19\] and must have the shape of input_ids, \[24, 20\]",
    ),
    "a mask of everything": (
        text, {"input_ids": WORDS, "attention_mask": torch.zeros(24, 20)},
        "attention_mask leaves every sample with fewer than 2 tokens",
    ),
    "an unknown token": (
        text, WORDS + VOCABULARY, "the vocabulary of LlamaForCausalLM has 50 tokens, from 0 to 49"
    ),
    "a negative token": (text, WORDS - VOCABULARY, "input_ids contains -.*, and the vocabulary"),
    "tokens with fractions": (text, WORDS.float(), "input_ids has dtype torch.float32 and must hold whole numbers"),
    "one token": (text, WORDS[:, :1], "input_ids has 1 token per sample, and a causal model needs at least 2"),
    "too many tokens": (
        lambda: model_of("gpt2"), WORDS.repeat(1, 60), "has 1200 tokens per sample, and GPT2.* reads at most 1024"
    ),
    "labels of other words": (
        masked, {"input_ids": WORDS, "labels": WORDS[:, 1:]}, "labels has shape .* and must have the shape of input_ids"
    ),
    "labels that ask for nothing": (
        masked, {"input_ids": WORDS, "labels": torch.full_like(WORDS, -100)}, "labels is -100 everywhere"
    ),
    "another key for pictures": (
        timm_vit, {"pixels": PICTURES, "labels": CLASSES}, "data has pixels, labels, and Vision.* needs pixel_values"
    ),
    "too many classes": (
        timm_vit, labeled(labels=CLASSES + 1), "labels contains 4, and VisionTransformer has 4 classes, from 0 to 3"
    ),
    "a class of transformers": (hf_vit, labeled(), "labels contains 2, and ViT.* has 2 classes, from 0 to 1"),
    "classes with fractions": (our_vit, labeled(labels=CLASSES.float()), "labels has dtype torch.float32"),
    "classes in two dimensions": (our_vit, labeled(labels=CLASSES[:, None]), r"labels has shape \[24, 1\] and must be"),
    "gray pictures": (hf_vit, labeled(PICTURES[:, :1], CLASSES % 2), "reads 3 channels"),
    "no channels": (our_vit, labeled(PICTURES[:, 0]), r"must be \[samples, channels, height, width\]"),
    "bytes": (our_vit, labeled(PICTURES.byte()), "pixel_values has dtype torch.uint8, and the weights"),
    "another size": (timm_vit, labeled(PICTURES[..., :30]), "VisionTransformer cannot read data with pixel_values"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_data_are_refused_in_one_sentence(case):
    make, data, sentence = WRONG[case]
    with pytest.raises(ArgumentError, match=sentence) as caught:
        plan(make(), data)
    assert "\n" not in str(caught.value)


def test_whole_numbers_of_any_type_are_read():
    parts = plan(text(), WORDS.int()).parts
    assert {x.dtype for part in parts for x in part.values()} == {torch.int64}
