"""The embedded set: scikit-learn's handwritten digits, 8 x 8 pixels in 17 grays, split once and for all.

1,437 to train on and 360 to test on, with the digits in equal shares.
"""

import numpy as np
from PIL import Image

from softless.data.images import Sample, Split, fingerprint
from softless.errors import MissingExtraError

TEST_IMAGES = 360


class DigitImages:
    """Gray levels 0 to 16, as RGB from 0 to 255."""

    classes = tuple("0123456789")

    def __init__(self, split: Split) -> None:
        try:
            from sklearn.datasets import load_digits
            from sklearn.model_selection import train_test_split
        except ModuleNotFoundError:
            raise MissingExtraError(
                "the embedded digits come with scikit-learn, and it is not installed: pip install 'softless[train]'"
            ) from None
        grays, labels = load_digits(return_X_y=True)
        parts = train_test_split(np.arange(len(labels)), test_size=TEST_IMAGES, random_state=0, stratify=labels)
        self.rows = np.sort(parts[split == "test"])
        self.pixels = (grays[self.rows] * (255 / 16)).round().astype(np.uint8).reshape(-1, 8, 8)
        self.labels = labels[self.rows].astype(np.int64)
        self.fingerprint = fingerprint(b"digits", self.rows, self.labels)

    def names(self, index: int) -> str:
        return f"digits[{self.rows[index]}]"

    def size(self, index: int) -> tuple[int, int]:
        return 8, 8

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        image = Image.fromarray(self.pixels[index]).convert("RGB")
        return Sample(image, int(self.labels[index]), self.names(index))
