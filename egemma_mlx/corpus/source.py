"""The input of a job: a file of records, scanned once for where its shards lie, and then read a shard at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from egemma_mlx.errors import EgemmaError
from egemma_mlx.records import Record, json_fields

_BOM = b"\xef\xbb\xbf"


class Shard(NamedTuple):
    """Bytes `start` to `end` of the file, which begin with line `line` (from 1) and hold `rows` records."""

    start: int
    end: int
    line: int
    rows: int
    sha256: str


@dataclass(frozen=True)
class Source:
    """What a scan knows of a file.

    Attributes:
        shards: in the order of the file, all but the last of as many rows.
        has_ids: whether every record has an "id".
        has_images: whether any record has an image.
        titled: the first record with a title.
    """

    path: str
    shards: tuple[Shard, ...]
    has_ids: bool
    has_images: bool
    titled: Record | None

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    def read(self, number: int) -> tuple[list[Record], list[Any]]:
        """The records of a shard, and their ids: "id" where every record of the file has one, else line numbers.

        Raises:
            EgemmaError: the file is no longer what was scanned.
        """
        shard = self.shards[number]
        with Path(self.path).open("rb") as file:
            file.seek(shard.start)
            data = file.read(shard.end - shard.start)
        if hashlib.sha256(data).hexdigest() != shard.sha256:
            raise EgemmaError(f"{self.path}: was changed, behind line {shard.line - 1}, while it was being embedded")
        numbered = [(line, record) for line, _, record in _records(self.path, BytesIO(data), shard.line) if record]
        return [record for _, record in numbered], [
            record.fields["id"] if self.has_ids else line for line, record in numbered
        ]


def scan(path: str, shard_rows: int, progress: Callable[[int], object] = lambda size: None) -> Source:
    """Check every line of a .txt or .jsonl file, and cut the file into shards of `shard_rows` records.

    Args:
        progress: called with the bytes of each shard.

    Raises:
        EgemmaError: another file extension; a file without records; a line, named, that is no record.
        OSError: the file cannot be read.
    """
    if Path(path).suffix.lower() not in (".txt", ".jsonl"):
        raise EgemmaError(f"{path}: expected a .txt or .jsonl file: a run that resumes reads it again")
    shards: list[Shard] = []
    has_ids, has_images, titled = True, False, None
    with Path(path).open("rb") as file:
        start = len(_BOM) if file.read(len(_BOM)) == _BOM else 0
        file.seek(start)
        for line, data, records in _cut(_records(path, file, 1), shard_rows):
            digest = hashlib.sha256(data).hexdigest()
            shards.append(Shard(start, start := start + len(data), line, len(records), digest))
            has_ids = has_ids and all("id" in record.fields for record in records)
            has_images = has_images or any(record.images for record in records)
            titled = titled or next((record for record in records if record.fields.get("title") is not None), None)
            progress(len(data))
    if not shards:
        raise EgemmaError(f"{path}: holds no records")
    return Source(path, tuple(shards), has_ids, has_images, titled)


def _records(path: str, lines: Iterable[bytes], first: int) -> Iterator[tuple[int, bytes, Record | None]]:
    """Lines with their numbers, and their records; a blank one is none, but in .txt a text."""
    folder, plain = Path(path).parent, Path(path).suffix.lower() == ".txt"
    for number, line in enumerate(lines, first):
        place = f"{path}:{number}"
        try:
            text = line.decode().removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise EgemmaError(f"{place}: expected UTF-8 but got byte {line[error.start]:#04x}") from None
        if plain:
            yield number, line, Record(place, {"text": text})
        else:
            yield number, line, Record(place, json_fields(text, place), folder) if text.strip() else None


def _cut(
    numbered: Iterable[tuple[int, bytes, Record | None]], shard_rows: int
) -> Iterator[tuple[int, bytes, list[Record]]]:
    """(number of the first line, bytes, records) of each shard; blank lines behind the last record are in none."""
    lines: list[bytes] = []
    records: list[Record] = []
    first, end = 1, 0
    for number, line, record in numbered:
        lines.append(line)
        if record is None:
            continue
        records.append(record)
        end = len(lines)
        if len(records) == shard_rows:
            yield first, b"".join(lines), records
            lines, records, first = [], [], number + 1
    if records:
        yield first, b"".join(lines[:end]), records
