"""Check the samples of a conversion against the model before any work, so that a mistake is told in one sentence."""

import torch
from torch import Tensor

from softless.conversion.layers import LABELS, Layers
from softless.conversion.metrics import IGNORED, Metric
from softless.conversion.samples import SampleSet, batches
from softless.errors import ArgumentError, SoftlessError
from softless.probes.interventions import evaluating

MASK, EMBEDDED = "attention_mask", "inputs_embeds"


def checked(layers: Layers, samples: SampleSet, metric: Metric) -> SampleSet:
    """Return samples that the model can read, with whole numbers as int64, or raise."""
    if layers.first not in samples and (layers.is_causal or layers.pictures or EMBEDDED not in samples):
        raise ArgumentError(f"data has {', '.join(samples)}, and {_kind(layers)} needs {layers.first}")
    samples = {name: _as_int64(name, x, layers) for name, x in samples.items()}
    if layers.pictures:
        _check_pictures(layers, samples[layers.first])
    elif layers.first in samples:
        _check_words(layers, samples)
    if metric.name == "accuracy":
        _check_classes(layers, samples)
    elif metric.name == "masked":
        _check_targets(layers, samples)
    _try(layers, samples, metric)
    return samples


def _kind(layers: Layers) -> str:
    return type(layers.model).__name__


def _as_int64(name: str, x: Tensor, layers: Layers) -> Tensor:
    if name != LABELS and (name != layers.first or layers.pictures):
        return x
    if x.is_floating_point() or x.is_complex():
        raise ArgumentError(f"{name} has dtype {x.dtype} and must hold whole numbers (torch.int64)")
    return x.long()


def _check_pictures(layers: Layers, x: Tensor) -> None:
    name = layers.first
    if x.ndim != 4:
        raise ArgumentError(f"{name} has shape {list(x.shape)} and must be [samples, channels, height, width]")
    if x.shape[1] != layers.channels:
        raise ArgumentError(
            f"{name} has shape {list(x.shape)}, and {_kind(layers)} reads {layers.channels} channels: "
            "[samples, channels, height, width]"
        )
    needed = next(layers.model.parameters()).dtype
    if x.dtype != needed and layers.package != "transformers":  # which casts images
        raise ArgumentError(f"{name} has dtype {x.dtype}, and the weights of {_kind(layers)} have {needed}")


def _check_words(layers: Layers, samples: SampleSet) -> None:
    name, x = layers.first, samples[layers.first]
    if x.ndim != 2:
        raise ArgumentError(f"{name} has shape {list(x.shape)} and must be [samples, tokens]")
    tokens, least = x.shape[1], 2 if layers.is_causal else 1
    if tokens < least:
        needed = "a causal model needs at least 2" if layers.is_causal else "at least 1 is needed"
        raise ArgumentError(f"{name} has {tokens} token{'s' * (tokens != 1)} per sample, and {needed}")
    if tokens > layers.most_tokens:
        raise ArgumentError(
            f"{name} has {tokens} tokens per sample, and {_kind(layers)} reads at most {layers.most_tokens}"
        )
    _check_range(name, x, layers.vocabulary, f"the vocabulary of {_kind(layers)}", "tokens")
    mask = samples.get(MASK)
    if mask is None:
        return
    if mask.shape != x.shape:
        raise ArgumentError(f"{MASK} has shape {list(mask.shape)} and must have the shape of {name}, {list(x.shape)}")
    if int((mask != 0).sum(1).max()) < least:
        raise ArgumentError(f"{MASK} leaves every sample with fewer than {least} token{'s' * (least != 1)} to read")


def _check_classes(layers: Layers, samples: SampleSet) -> None:
    labels = samples[LABELS]
    if labels.ndim != 1:
        raise ArgumentError(f"{LABELS} has shape {list(labels.shape)} and must be [samples], one class per sample")
    _check_range(LABELS, labels, layers.classes, _kind(layers), "classes")


def _check_targets(layers: Layers, samples: SampleSet) -> None:
    labels, words = samples[LABELS], samples.get(layers.first)
    if words is not None and labels.shape != words.shape:
        raise ArgumentError(
            f"{LABELS} has shape {list(labels.shape)} and must have the shape of {layers.first}, {list(words.shape)}"
        )
    asked = labels[labels != IGNORED]
    if not len(asked):
        raise ArgumentError(f"{LABELS} is {IGNORED} everywhere, so it asks for no masked token")
    _check_range(LABELS, asked, layers.vocabulary, f"the vocabulary of {_kind(layers)}", "tokens")


def _check_range(name: str, x: Tensor, count: int, owner: str, things: str) -> None:
    wrong = x[(x < 0) | (x >= count)]
    if len(wrong):
        raise ArgumentError(
            f"{name} contains {int(wrong[0])}, and {owner} has {count:,} {things}, from 0 to {count - 1:,}"
        )


def _try(layers: Layers, samples: SampleSet, metric: Metric) -> None:
    """Run the model on one sample, and tell what it says if it cannot."""
    first = next(batches({name: x[:1] for name, x in samples.items()}, 1, layers.device))
    try:
        with evaluating(layers.model), torch.no_grad():
            metric.answers(layers.run, first)
    except (SoftlessError, torch.OutOfMemoryError):
        raise
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in samples.items())
        text = " ".join(str(error).split())
        raise ArgumentError(f"{_kind(layers)} cannot read data with {shapes} ({text})") from error
