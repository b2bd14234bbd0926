"""Rank images and the paragraphs of text files by how near they are to a query.

Folders are read without hidden files, data (.csv, .json, …) and whatever is neither an image by its name (.jpg, .png,
.webp, .gif, .bmp, .tiff) nor UTF-8 text. Images that cannot be read are skipped, each with a line.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import unicodedata
from bisect import bisect_right
from collections.abc import Iterable
from contextlib import nullcontext
from io import TextIOWrapper
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from egemma_mlx.cli import common
from egemma_mlx.cli.arguments import add_shared, count
from egemma_mlx.errors import EgemmaError

if TYPE_CHECKING:
    from egemma_mlx.documents import Corpus, Paragraph, Picture
    from egemma_mlx.encoder import Encoder

    Hit = tuple[float, Paragraph | Picture]

# Tokens of a piece that search ranks: a paragraph of any usual length, and short enough to point at.
_PIECE_TOKENS = 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("query", metavar="QUERY", help="a text, or an image file")
    parser.add_argument("paths", nargs="+", metavar="FILE_OR_FOLDER")
    parser.add_argument("--top", type=count, default=10, metavar="K", help="results to print (default: 10)")
    parser.add_argument("--only", choices=("images", "text"), help="leave files of the other kind out")
    parser.add_argument(
        "--contact-sheet",
        type=Path,
        metavar="FILE",
        help="write the results as a picture (.png) or a page that holds its own thumbnails (.html)",
    )
    add_shared(
        parser,
        "--prompt-name",
        "--batch-tokens",
        "--max-soft-tokens",
        "--json",
        "--backend",
        "--compute-precision",
        "--model",
        "--revision",
    )


def run(arguments: argparse.Namespace) -> None:
    from egemma_mlx import contact_sheet, documents
    from egemma_mlx.records import complete

    sheet: Path | None = arguments.contact_sheet
    if sheet is not None and sheet.suffix.lower() not in contact_sheet.WRITERS:
        raise EgemmaError(f"--contact-sheet {sheet}: expected a name that ends in {', '.join(contact_sheet.WRITERS)}")
    if sheet is not None and (lack := common.no_pillow()):
        raise EgemmaError(f"--contact-sheet {sheet}: {lack}")
    query = Path(arguments.query) if documents.names_an_image(arguments.query) else arguments.query
    corpus = documents.read_corpus(arguments.paths, arguments.only, but=sheet)
    if not corpus.paragraphs and not corpus.images:
        raise EgemmaError(f"nothing to search: {_summary(corpus)}")
    common.say(_summary(corpus))
    if corpus.images and isinstance(query, str) and corpus.paragraphs and (lack := common.no_images(arguments)):
        common.say(f"the images are left out: {lack}")
        corpus = corpus._replace(images=[])

    encoder = common.encoder(arguments, images=bool(corpus.images) or isinstance(query, Path))
    # Opened before the work, so that hours of it are not lost to a folder that cannot be written.
    with nullcontext() if sheet is None else complete(sheet) as file:
        hits = _ranked(encoder, query, corpus, arguments)
        if sheet is not None and file is not None:
            results = [contact_sheet.Result(score, _place(hit), _shown(hit)) for score, hit in hits]
            contact_sheet.WRITERS[sheet.suffix.lower()](file, query, results)
    _print_hits(hits, arguments.json)


def _summary(corpus: Corpus) -> str:
    texts = (
        f"{len(corpus.paragraphs)} paragraphs in {corpus.files} files ({corpus.skipped} more are unreadable as text)"
    )
    images = f"{len(corpus.images)} images"
    if not corpus.images:
        return texts
    return f"{texts}, {images}" if corpus.files or corpus.skipped else images


def _ranked(encoder: Encoder, query: Path | str, corpus: Corpus, arguments: argparse.Namespace) -> list[Hit]:
    import numpy as np

    from egemma_mlx import documents
    from egemma_mlx.records import COUNTED, placed
    from egemma_mlx.tokenizer import IMAGE_TOKEN

    tokenizer = encoder.tokenizer
    limit = min(_PIECE_TOKENS, tokenizer.max_length)

    def document(paragraph: Paragraph) -> str:
        # A file may speak of <|image|>; a space makes that the text which it is there, and no place for an image.
        return tokenizer.document(paragraph.text, paragraph.title).replace("<|", "< |")

    def fits(paragraph: Paragraph) -> bool:
        # No token stands for eight characters on average: what is far too long need not be counted.
        text = document(paragraph)
        return len(text) <= 8 * limit and not tokenizer.ids([text], max_length=limit, truncation=True).truncated

    pieces = [piece for paragraph in corpus.paragraphs for piece in documents.pieces(paragraph, fits)]
    inputs: list[dict[str, Any]] = [
        *({"text": document(piece)} for piece in pieces),
        *({"text": tokenizer.document(IMAGE_TOKEN), "image": Path(image.file)} for image in corpus.images),
    ]
    soft_tokens = common.soft_tokens(encoder, arguments)
    options: dict[str, Any] = {"batch_tokens": arguments.batch_tokens, "max_soft_tokens": soft_tokens}
    # An image is looked for as the images searched are, so that its copy is the nearest.
    encode_query = encoder.encode_query if isinstance(query, str) else encoder.encode_document
    try:
        near = encode_query(query, prompt_name=arguments.prompt_name, **options)
    except EgemmaError as refused:
        raise placed(refused, ["query"]) from None
    found = encoder.encode(inputs, prompt="", on_error="skip", **options)
    for _, error in sorted(found.errors.items()):
        common.say(f"skipped {COUNTED.sub('', str(error), 1)}")
    if found.errors:
        common.say(f"{len(found.errors)} of {len(corpus.images)} images are skipped")
    if not len(found.indices):
        raise EgemmaError("nothing to search: no image can be read")
    scores = encoder.similarity(near, found.vectors)[0]
    entries = [*pieces, *corpus.images]
    best = np.argsort(-scores, kind="stable")[: arguments.top]
    return [(float(scores[i]), entries[found.indices[i]]) for i in best]


def _shown(found: Paragraph | Picture) -> Path | str:
    from egemma_mlx.documents import Picture

    return Path(found.file) if isinstance(found, Picture) else found.text


def _place(found: Paragraph | Picture) -> str:
    from egemma_mlx.documents import Picture, one_line

    file = one_line(found.file)
    return file if isinstance(found, Picture) else f"{file}:{found.line}"


def _print_hits(hits: Iterable[Hit], as_json: bool) -> None:
    from egemma_mlx.documents import Picture, one_line

    if as_json:
        for score, hit in hits:
            kind = {"image": hit.file} if isinstance(hit, Picture) else {}
            print(json.dumps({"score": score, **hit._asdict(), **kind}))
        return
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # files hold characters that a terminal's encoding may lack
    columns = shutil.get_terminal_size().columns
    for score, hit in hits:
        place = f"{score:.4f}  {_place(hit)}"
        if isinstance(hit, Picture):
            print(place)
            continue
        title = "" if hit.title == Path(hit.file).name else f"  {one_line(hit.title)}"
        print(_cut(place + title, max(columns, len(place))))
        print(_cut(f"        {one_line(hit.text)}", columns))


def _cut(text: str, columns: int) -> str:
    """As much of a text as fits the columns of a terminal, where some characters take two."""
    ends = list(accumulate(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text))
    return text if not ends or ends[-1] <= columns else text[: bisect_right(ends, columns - 1)] + "…"
