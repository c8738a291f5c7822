"""Pictures without labels: a file, a folder of files at any depth, or the column `image` of a parquet file."""

from pathlib import Path
from typing import TYPE_CHECKING

from softless.data.parquet import open_table, read_pictures
from softless.errors import FileError
from softless.io.pictures import SUFFIXES, decode, read

if TYPE_CHECKING:
    from PIL.Image import Image


class ListedPictures:
    """Some pictures, decoded as they are read.

    names   where each lies
    stems   a relative path for what is made of each, without a suffix; they are all different
    """

    def __init__(self, source: str | Path) -> None:
        path = Path(source)
        self.rows = None
        if path.is_file() and path.suffix == ".parquet":
            self.rows = read_pictures(path, open_table(path))
            self.names = [f"{path}[row {row}]" for row in range(len(self.rows))]
            self.stems = [Path(f"{path.stem}-{row:06}") for row in range(len(self.rows))]
            return
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
            relative = [file.relative_to(path) for file in files]
        elif path.is_file():
            files, relative = [path], [Path(path.name)]
        else:
            raise FileError(f"{path}: there is no such picture, folder of pictures or parquet file")
        if not files:
            raise FileError(f"{path}: there is no picture in this folder; pictures end with {', '.join(SUFFIXES)}")
        self.names = list(map(str, files))
        stems = [file.with_suffix("") for file in relative]
        twice = {stem for stem in stems if stems.count(stem) > 1} if len({*stems}) < len(stems) else set()
        self.stems = [file if stem in twice else stem for file, stem in zip(relative, stems, strict=True)]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> "Image":
        """Decode a picture; raise `BadImage` if that fails."""
        name = self.names[index]
        return decode(read(name, name) if self.rows is None else self.rows[index].as_py() or b"", name)
