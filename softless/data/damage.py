"""What to do about an image that cannot be decoded.

    fail   stop at the first, and name it
    skip   leave it out, remember its name, and stop when more than 0.1 % of the set are such

An image that comes again in another epoch is counted once. Each process counts for itself; a
training puts together what all of them skipped (`skipped.json`).
"""

from typing import Literal

from softless.errors import ArgumentError, FileError
from softless.io.pictures import BadImage

OnBadImage = Literal["fail", "skip"]

LIMIT = 0.001  # of the images of a set


class Damage:
    """The policy and its counter: `met` of every bad image, `skipped` of those that were left out."""

    def __init__(self, on_bad_image: OnBadImage, images: int) -> None:
        if on_bad_image not in ("fail", "skip"):
            raise ArgumentError(f"on_bad_image is {on_bad_image!r} and must be 'fail' or 'skip'")
        self.on_bad_image, self.images = on_bad_image, images
        self.skipped: dict[str, str] = {}  # name -> why

    def met(self, name: str, why: str) -> None:
        """Raise, or note it and return."""
        if self.on_bad_image == "fail":
            raise BadImage(name, why)
        self.skipped[name] = why
        if len(self.skipped) > LIMIT * self.images:
            raise FileError(
                f"{name}: {why}; {len(self.skipped)} of {self.images} images are damaged by now, and skip leaves out "
                f"at most {LIMIT:.1%} of them: {int(LIMIT * self.images)}"
            )
