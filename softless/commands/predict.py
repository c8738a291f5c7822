"""softless predict: what a trained model says about pictures of yours.

A classifier writes FOLDER/NAME.txt with its five best classes. A segmentation writes FOLDER/NAME.png, the picture with
the colors of its classes over it, and FOLDER/NAME-mask.png, the numbers of the classes as the training masks have them.
A detection writes FOLDER/NAME.png, the picture with the boxes whose score is at least 0.5, and FOLDER/NAME-boxes.json,
all boxes: [{"class", "score", "box": [left, top, right, bottom]}]. With Mask R-CNN, the masks are drawn too, and each
box has its "mask" as a compressed run-length code of COCO: {"size": [height, width], "counts"}.

JSON (schema softless.predict/1): {"schema", "run", "task", "images": [{"name", "files", "classes": {name: share}}]}. A
share is a probability, the share of the pixels that the class has, or the highest score of its boxes.
FOLDER/predict.json is the same document, with the "files" of FOLDER that predict has ever written.

An answer replaces an earlier answer, and no other file. No two answers have the same file. A FOLDER where that would
happen is refused at once.

Exit status: 0 predicted, 2 usage, 3 bad input.
"""

import os
from collections.abc import Callable, Collection
from itertools import compress
from json import dumps as json_text
from json import loads as from_json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import typer

from softless.commands.arguments import Where
from softless.commands.common import (
    console,
    emit_json,
    plain,
    prepare_folder,
    reports_errors,
    task_of_run,
    warnings_in_one_line,
)
from softless.commands.progress import progress
from softless.errors import ArgumentError
from softless.io.files import write_json, written_or_explained
from softless.report import units

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from softless.data.listed import ListedPictures

SCHEMA, MARK = "softless.predict/1", "predict.json"
SUMMARY = "Let a trained model answer for pictures, and draw its masks or boxes."
HELP = """Let the best model of a run answer for pictures, and write its answers to a folder.

IMAGES is a picture, a folder of pictures, or a parquet file with a column image. A classifier writes its five best
classes as text; a segmentation draws the classes onto the picture, and writes the mask; a detection draws boxes (and
masks, if it has them) onto the picture, and writes them as JSON.

\b
$ softless predict runs/flowers photos/ --out answers
$ softless predict runs/camvid street.jpg --out answers
"""
BEST = 5
DRAWN = 0.5  # the lowest score of a box that is drawn

Answer = tuple[dict[str, float], tuple[Any, ...]]  # class -> share; a text or picture for each suffix


class Predicted(TypedDict):
    """One picture in the JSON document."""

    name: str
    files: list[str]
    classes: dict[str, float]


@reports_errors
def run(
    folder: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run.")],
    images: Annotated[str, typer.Argument(metavar="IMAGES", help="A picture, a folder, or a parquet file.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where to write; created if missing.")],
    device: Annotated[Where, typer.Option(help="auto uses CUDA if there is one.")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Load the model, run it on each picture, and write the answers."""
    import torch

    from softless.data.listed import ListedPictures
    from softless.machine import pick_device
    from softless.train.recipe import DETECT, IMAGES, LANGUAGE, SEGMENT

    task = task_of_run(folder)
    if task is None or task == LANGUAGE:
        held = "is no run" if task is None else "is the run of a language model"
        raise ArgumentError(f"{folder} {held}, and the run of a model for images is needed")
    pictures = ListedPictures(images)
    prepare_folder(out)
    load, suffixes = {
        IMAGES: (classifier, (".txt",)),
        SEGMENT: (segmentation, (".png", "-mask.png")),
        DETECT: (detection, (".png", "-boxes.json")),
    }[task]
    about, earlier = {"schema": SCHEMA, "run": folder, "task": task}, written_before(out)
    files = sorted({*earlier, *check_files(pictures, out, suffixes, earlier)})
    with warnings_in_one_line():
        answer = load(Path(folder), torch.device(pick_device(device)))
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / MARK, {**about, "images": [], "files": files})  # before any answer: this run may be stopped
    predicted: list[Predicted] = []
    with progress(len(pictures), not json) as advance, torch.inference_mode():
        for index, (name, stem) in enumerate(zip(pictures.names, pictures.stems, strict=True)):
            classes, contents = answer(pictures[index])
            paths = [
                write(out / f"{stem}{suffix}", content) for suffix, content in zip(suffixes, contents, strict=True)
            ]
            predicted.append({"name": name, "files": paths, "classes": classes})
            advance(f"predicting {stem}", 1)
    write_json(out / MARK, {**about, "images": predicted, "files": files})
    if json:
        emit_json({**about, "images": predicted})
        return
    for each in predicted:
        best = sorted(each["classes"].items(), key=lambda item: -item[1])[:BEST]
        shares = ", ".join(f"{plain(name)} {share:.1%}" for name, share in best)
        console().print(f"{plain(each['files'][0])}: {shares or 'no objects'}", soft_wrap=True)
    console().print(f"{units.counted(len(predicted), 'picture')} in {plain(str(out))}", soft_wrap=True)


def written_before(out: Path) -> list[str]:
    """Return the files in a folder that predict has written."""
    path = out / MARK
    if not path.exists():
        return []
    try:
        document = from_json(path.read_text(encoding="utf-8"))
        if document["schema"] == SCHEMA:
            return [str(name) for name in document["files"]]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise ArgumentError(f"--out {out}: {path} is there, and predict did not write it: give another folder")


def check_files(
    pictures: "ListedPictures", out: Path, suffixes: tuple[str, ...], earlier: Collection[str]
) -> list[str]:
    """Return the files to write; refuse to replace one that predict did not write, or one answer by another."""
    read = {identity(Path(name)) for name in pictures.names} - {None}
    written: dict[Path, str] = {}
    for name, stem in zip(pictures.names, pictures.stems, strict=True):
        for path in (out / f"{stem}{suffix}" for suffix in suffixes):
            if identity(path) in read:
                raise ArgumentError(f"--out {out}: this would overwrite the input picture {path}: give another folder")
            if str(path.relative_to(out)) not in earlier and os.path.lexists(path):
                raise ArgumentError(f"--out {out}: this would overwrite {path}: give another folder")
            if (other := written.setdefault(path, name)) != name:
                raise ArgumentError(
                    f"--out {out}: the answers for {other} and {name} would both be {path}: rename one of the pictures"
                )
    return [str(path.relative_to(out)) for path in written]


def identity(path: Path) -> tuple[int, int] | None:
    """Return what is equal for two paths to the same file, through links of any kind; None if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def classifier(folder: Path, device: "torch.device") -> "Callable[[Image], Answer]":
    """Return what a classifier answers: its five best classes."""
    import torch

    from softless.data.augment import transform
    from softless.data.device_augment import normalize
    from softless.train.recipe import from_document
    from softless.train.tasks.classify import trained

    model, about = trained(folder)
    model, recipe = model.to(device).eval(), from_document(about["recipe"])
    prepare = transform(recipe.augment, recipe.image_size, train=False)

    def answer(image: "Image") -> Answer:
        pixels = torch.as_tensor(prepare(image))[None].to(device)
        shares = model(normalize(pixels, recipe.augment.mean, recipe.augment.std))[0].float().softmax(0)
        best = shares.topk(min(BEST, len(shares)))
        classes = {about["classes"][at]: share for share, at in zip(*(part.tolist() for part in best), strict=True)}
        return classes, ("".join(f"{share:.4f} {name}\n" for name, share in classes.items()),)

    return answer


def segmentation(folder: Path, device: "torch.device") -> "Callable[[Image], Answer]":
    """Return what a segmentation answers: the picture with its classes drawn, and the mask."""
    import numpy as np
    from PIL import Image as Pillow

    from softless.data.drawing import painted
    from softless.train.assemble_dense import trained
    from softless.train.tasks.segment import answered

    model, recipe, about = trained(folder)
    model, names = model.to(device).eval(), tuple(about["classes"])
    numbers = np.array(recipe.masks.numbers(names), np.uint8)

    def answer(image: "Image") -> Answer:
        mask = answered(model, recipe, image, device)
        shares = np.bincount(mask.ravel(), minlength=len(names)) / mask.size
        classes = {name: float(share) for name, share in zip(names, shares, strict=True)}
        return classes, (painted(image, mask, names), Pillow.fromarray(numbers[mask]))

    return answer


def detection(folder: Path, device: "torch.device") -> "Callable[[Image], Answer]":
    """Return what a detection answers: the picture with its boxes and masks drawn, and both as JSON."""
    from softless.data.drawing import framed
    from softless.data.object_masks import decode
    from softless.train.assemble_dense import trained
    from softless.train.tasks.detect import answered

    model, recipe, about = trained(folder)
    model, names = model.to(device).eval(), tuple(about["classes"])

    def answer(image: "Image") -> Answer:
        corners, labels, scores, masks = answered(model, recipe, image, device)
        objects: list[dict[str, Any]] = [
            {"class": names[label], "score": round(float(score), 4), "box": [round(float(side), 2) for side in box]}
            for box, label, score in zip(corners, labels, scores, strict=True)
        ]
        classes = {each["class"]: each["score"] for each in reversed(objects)}  # the highest score comes last
        for each, code in zip(objects, masks, strict=False):  # a head that finds boxes alone has no masks
            each["mask"] = code | {"counts": code["counts"].decode()}
        sure = scores >= DRAWN
        outlines = [decode(code) for code in compress(masks, sure)]
        drawn = framed(image, corners[sure], labels[sure], scores[sure], names, outlines)
        return classes, (drawn, f"{json_text(objects)}\n")

    return answer


def write(path: Path, content: Any) -> str:
    """Write a text or a picture, and return the path."""
    with written_or_explained(str(path)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content) if isinstance(content, str) else content.save(path)
    return str(path)
