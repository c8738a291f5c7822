"""Read, check, sample and augment labeled images from folders, parquet files and the embedded digits."""

from softless.data.images import Images, Sample
from softless.data.sources import open_images, open_splits

__all__ = ["Images", "Sample", "open_images", "open_splits"]
