"""Draws docs/gallery/*.png: for each section of docs/gallery.md, what its `options` make the kernel compute."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

import speedlight as sl
from speedlight.calls.pictures import tile_map

PAGE = Path(__file__).parent.parent / "docs" / "gallery.md"
SIZE = 4.4, 4.7  # inches


def sections(text: str) -> Iterator[tuple[str, str]]:
    """Title and code of each section; all begin with the code of the page."""
    first, *rest = re.split(r"^## ", text, flags=re.MULTILINE)
    for section in rest:
        code = [re.findall(r"```python\n(.*?)```", x, re.DOTALL)[0] for x in (first, section)]
        yield section.split("\n")[0], "\n".join(code)


def planned(code: str) -> sl.Plan:
    """Plans what the kernel would do with the `options` that this code makes."""
    names: dict[str, Any] = {}
    exec(code, names)
    return sl.plan(**{"q_heads": 1, "q_len": 4096, "head_dim": 64, "exact": True} | names["options"])


def file_of(title: str) -> str:
    return re.sub(r"[\W_]+", "-", title.lower()) + ".png"


def main() -> None:
    folder = PAGE.parent / "gallery"
    folder.mkdir(exist_ok=True)
    for title, code in sections(PAGE.read_text()):
        path = folder / file_of(title)
        tile_map(planned(code), 0, title, size=SIZE).savefig(path, dpi=100)
        note = PngInfo()
        note.add_itxt("Source", code)  # by which a test sees that the picture is of this code
        with Image.open(path) as picture:
            picture.convert("RGB").quantize(256).save(path, pnginfo=note, optimize=True)


if __name__ == "__main__":
    main()
