"""Answers to images that were not trained on, counted; every rank counts its share."""

import torch
from torch import nn

from softless.train.devices import Devices
from softless.train.feed import Feed
from softless.train.metrics import Tally


def evaluate(model: nn.Module, feed: Feed, devices: Devices) -> Tally:
    """The tally of a model's answers to all images of a feed, each seen once, as the paper tests.

    A compiled model runs uncompiled here: the last batch is smaller, and each size would be compiled anew. Of a sharded
    one every rank has to make every pass, and one with fewer images makes the rest on a blank.
    """
    model.eval()
    tally, passes = Tally(feed.classes, len(feed.images), devices.device), 0
    feed.begin(0)
    with torch.no_grad(), devices.autocast(), torch.compiler.set_stance("force_eager"):
        for batch in feed:
            pixels, labels = feed.finish(batch)
            tally.add(model(pixels), labels, batch.ids.to(devices.device))
            passes += 1
        for _ in range(feed.passes - passes if devices.sharing == "fsdp" else 0):
            model(feed.blank())
    devices.add_up(tally.tensors())
    return tally
