"""Records to embed, read one a line, and files of them with their vectors."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple
from uuid import uuid4

from egemma_mlx.documents import names_an_image
from egemma_mlx.errors import EgemmaError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from egemma_mlx.tokenizer import Tokenizer

# How the encoder's errors begin where they are about one input: "input 3: …", "prompt + text 3 has …".
COUNTED = re.compile(r"input (\d+): |((?:prompt \+ )?(?:text|input)) (\d+)")
# How an image's name begins where it is no path. (The encoder has an error for URLs.)
_NO_PATH = ("data:", "http://", "https://")


class Record(NamedTuple):
    """`fields` holds "text" (str), "image" (str, or a list of them) or both in the order of their parts, maybe "title"
    (str), and whatever else came. `place` is for errors, "file:line"; image paths are relative to `folder`."""

    place: str
    fields: dict[str, Any]
    folder: Path = Path()

    @property
    def images(self) -> list[Path | str]:
        """Paths, and what names an image otherwise, a data URI."""
        value = self.fields.get("image", [])
        return [
            image if image.startswith(_NO_PATH) else self.folder / image
            for image in (value if isinstance(value, list) else [value])
        ]


def placed(error: EgemmaError, places: Sequence[str]) -> EgemmaError:
    """An error of the encoder, which counts inputs, for whoever wrote a file and looks for the line."""
    found = COUNTED.match(str(error))
    if found is None:
        return error
    return EgemmaError(f"{places[int(found[1] or found[3])]}: {COUNTED.sub(lambda _: found[2] or '', str(error), 1)}")


def argument_records(arguments: Sequence[str]) -> list[Record]:
    """The records of a command line: texts, and the names of image files.

    Raises:
        EgemmaError: what looks like the name of an image file, but is none.
    """
    kinds = ["image" if names_an_image(argument) else "text" for argument in arguments]
    return [
        Record(f"{kind} {number}", {kind: argument})
        for number, (kind, argument) in enumerate(zip(kinds, arguments, strict=True), 1)
    ]


def read_records(source: str) -> list[Record]:
    """The records of a .txt file (each line a text), a .jsonl file (each line a JSON string, or an object with "text",
    "image" or both) or, for "-", of standard input (each line a text). Blank lines are texts too, but not in .jsonl.

    Raises:
        EgemmaError: another file extension; a line, named, that is not UTF-8, not JSON or has neither text nor image.
        OSError: the file cannot be read.
    """
    if source == "-":
        return _text_records(sys.stdin.buffer, "<stdin>")
    readers = {".txt": _text_records, ".jsonl": _json_records}
    path = Path(source)
    if path.suffix.lower() not in readers:
        raise EgemmaError(f"{source}: expected a .txt or .jsonl file, or - for standard input")
    with path.open("rb") as file:
        return readers[path.suffix.lower()](file, source)


def _text_records(file: BinaryIO, name: str) -> list[Record]:
    return [Record(place, {"text": line}) for place, line in _lines(file, name)]


def _json_records(file: BinaryIO, name: str) -> list[Record]:
    folder = Path(name).parent
    return [Record(place, json_fields(line, place), folder) for place, line in _lines(file, name) if line.strip()]


def json_fields(line: str, place: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise EgemmaError(f"{place}: not JSON ({reason})") from None
    fields = {"text": value} if isinstance(value, str) else value
    if not isinstance(fields, dict) or not {"text", "image"} & fields.keys():
        found = f"an object with {', '.join(fields) or 'nothing'}" if isinstance(fields, dict) else _json_type(fields)
        raise EgemmaError(f'{place}: expected a string or an object with "text" or "image" but got {found}')
    for key, allowed in (("text", str), ("title", (str, type(None)))):
        if not isinstance(fields.get(key, ""), allowed):
            raise EgemmaError(f'{place}: expected "{key}" to be a string but got {_json_type(fields[key])}')
    image = fields.get("image", "")
    for path in image if isinstance(image, list) and image else [image]:
        if not isinstance(path, str):
            raise EgemmaError(f'{place}: expected "image" to be a path or an array of them but got {_json_type(path)}')
    return fields


def _json_type(value: object) -> str:
    names = {str: "a string", list: "an array", dict: "an object", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _lines(file: BinaryIO, name: str) -> Iterator[tuple[str, str]]:
    """("file:line", its text); a line ends at \\n or \\r\\n, not at the other marks that str.splitlines takes."""
    for number, raw in enumerate(file, 1):
        place = f"{name}:{number}"
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise EgemmaError(f"{place}: expected UTF-8 but got byte {raw[error.start]:#04x}") from None
        yield place, line.removesuffix("\n").removesuffix("\r")


def prompted(
    records: list[Record], tokenizer: Tokenizer, prompt_name: str | None, prompt: str | None
) -> tuple[list[dict[str, Any]], str]:
    """What `Encoder.encode` embeds, and the prompt before each as `Tokenizer.prompt` chooses it.

    When any record has a title, all are documents, and each carries its own document prompt.

    Raises:
        EgemmaError: an unknown prompt name; a title where another prompt was asked for.
    """
    prefix = tokenizer.prompt(prompt_name, prompt)
    titled = next((record for record in records if record.fields.get("title") is not None), None)
    if titled is None:
        return [{"text": _content(record), "image": record.images} for record in records], prefix
    if (prompt_name is not None or prompt is not None) and prefix != tokenizer.document(""):
        raise EgemmaError(f"{titled.place}: has a title, which only the document prompt can carry, not {prefix!r}")
    documents = [tokenizer.document(_content(record), record.fields.get("title")) for record in records]
    return [{"text": text, "image": record.images} for text, record in zip(documents, records, strict=True)], ""


def _content(record: Record) -> str:
    """The text, with a placeholder for each image that it has none for."""
    from egemma_mlx.tokenizer import IMAGE_TOKEN

    text, images = record.fields.get("text", ""), record.images
    if images and IMAGE_TOKEN in text:
        return text
    parts = {"text": text, "image": IMAGE_TOKEN * len(images)}
    return "".join(parts[key] for key in record.fields if key in parts)


# --- with vectors ----------------------------------------------------------------------------------------------------


@contextmanager
def complete(path: Path) -> Iterator[BinaryIO]:
    """A binary file that is at `path` once the block has ended, and nowhere if it raised.

    Raises:
        EgemmaError: it cannot be written.
    """
    # A name of its own: another process may write the same file, and what a killed one left may be there.
    partial = path.with_name(f".{path.name}.{uuid4().hex}.partial")
    try:
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        file = partial.open("xb")
        try:
            with file:
                yield file
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise EgemmaError(f"{path}: cannot be written ({error.strerror or error})") from error


def _write_npy(file: BinaryIO, records: list[Record], vectors: NDArray[Any]) -> None:
    import numpy as np

    np.save(file, vectors)


def _write_npz(file: BinaryIO, records: list[Record], vectors: NDArray[Any]) -> None:
    import numpy as np

    if records and all("id" in record.fields for record in records):
        names = {"ids": [record.fields["id"] for record in records]}
    else:
        names = {"texts": [record.fields.get("text", "") for record in records]}
        if any(record.images for record in records):
            names["images"] = ["\n".join(map(str, record.images)) for record in records]
    # A dtype of str, whatever the ids are: anything else might be pickled.
    arrays: dict[str, Any] = {key: np.array(list(map(str, values)), dtype=str) for key, values in names.items()}
    np.savez_compressed(file, embeddings=vectors, **arrays)


def _write_jsonl(file: BinaryIO, records: list[Record], vectors: NDArray[Any]) -> None:
    file.writelines(line.encode() for line in json_lines(records, vectors))


WRITERS: dict[str, Callable[[BinaryIO, list[Record], NDArray[Any]], None]] = {
    ".npy": _write_npy,
    ".jsonl": _write_jsonl,
    ".npz": _write_npz,
}


def json_lines(records: list[Record], vectors: NDArray[Any]) -> Iterator[str]:
    for record, vector in zip(records, vectors, strict=True):
        # By way of str: the shortest decimals that give the float32 back, half the length of a double's.
        numbers = vector.astype(str).astype(float) if vector.dtype.kind == "f" else vector
        yield json.dumps({**record.fields, "embedding": numbers.tolist()}) + "\n"
