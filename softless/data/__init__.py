"""Labeled images: folders, parquet files and the embedded digits; what reads, checks, samples and augments them."""

from softless.data.images import Images, Sample
from softless.data.sources import open_images, open_splits

__all__ = ["Images", "Sample", "open_images", "open_splits"]
