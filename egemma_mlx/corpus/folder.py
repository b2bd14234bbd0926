"""The folder of a job: what is in it, how it gets there, and how it is read again.

    job.json          what was asked for; a run that resumes must ask for the same
    part-00000.npy    the vectors of a shard, [rows, width] (or part-00000.parquet: columns "id" and "embedding")
    part-00000.json   its rows, hashes and ids; written last, it says that the shard is finished
    manifest.json     all parts; written last of all, it says that the job is

A file appears under its name when all of it is on the disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from egemma_mlx.errors import EgemmaError
from egemma_mlx.records import complete

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from egemma_mlx.corpus.source import Shard

Format = Literal["npy", "parquet"]
FORMATS: tuple[Format, ...] = get_args(Format)

_JOB, _MANIFEST = "job.json", "manifest.json"
_PART = re.compile(r"part-(\d+)\.json")
_PARTIAL = re.compile(r"\.(?:part-(\d+)|job|manifest)\.\w+\.\w+\.partial")


class Vectors(NamedTuple):
    """What a finished job has made.

    Attributes:
        ids: of every row: its "id", or its line number.
        parts: memory-mapped arrays [rows, width]; their rows, one array after the other, are those of `ids`.
    """

    ids: list[Any]
    parts: list[NDArray[Any]]


class Folder:
    """The output of one job.

    Args:
        shards: of the input.
        file_format: of the vectors.
    """

    def __init__(self, path: Path, shards: Sequence[Shard], file_format: Format) -> None:
        self.path, self._shards, self._format = path, shards, file_format

    def begin(self, job: Mapping[str, Any]) -> None:
        """Write what is asked for into a new folder. (One rank does.)

        Raises:
            EgemmaError: it holds something else.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if (self.path / _JOB).exists():
            return
        if found := sorted(path.name for path in self.path.iterdir() if not path.name.startswith(".")):
            raise EgemmaError(f"{self.path}: expected a new or empty folder, or a job's, but it has {found[0]}")
        _write(self.path / _JOB, _json(job))

    def resume(self, job: Mapping[str, Any], share: range) -> list[int]:
        """Which shards of a share are still to be made. What a killed run left of them unfinished is removed.

        Raises:
            EgemmaError: the folder is another job's, by what was asked for or by the lines of a finished shard.
        """
        begun = _read(self.path / _JOB)
        if differences := list(_differences(begun, job)):
            raise EgemmaError(
                f"{self.path}: was begun with {'; '.join(differences)}: ask for the same, or name another folder"
            )
        finished = set()
        for path in self.path.iterdir():
            if part := _PART.fullmatch(path.name):
                finished.add(int(part[1]))
            elif (partial := _PARTIAL.fullmatch(path.name)) and int(partial[1] or 0) in share:
                path.unlink(missing_ok=True)
        if finished and max(finished) >= len(self._shards):
            last = self._part(max(finished)).with_suffix(".json")
            raise EgemmaError(f"{last}: was made of lines that the input no longer has; name another folder")
        for number in sorted(finished.intersection(share)):
            self._record(number)
        if 0 in share and len(finished) < len(self._shards):
            (self.path / _MANIFEST).unlink(missing_ok=True)
        return [number for number in share if number not in finished]

    def add(self, number: int, ids: list[Any], vectors: NDArray[Any]) -> None:
        """Store a shard."""
        data = _npy(vectors) if self._format == "npy" else _parquet(ids, vectors)
        _write(self._part(number), data)
        record = {
            "rows": len(vectors),
            "width": vectors.shape[1],
            "dtype": str(vectors.dtype),
            "sha256": hashlib.sha256(data).hexdigest(),
            "input_line": self._shards[number].line,
            "input_sha256": self._shards[number].sha256,
            "ids": ids,
        }
        _write(self._part(number).with_suffix(".json"), _json(record))

    def finish(self) -> None:
        """Write the manifest. (One rank does, when all are done.)

        Raises:
            EgemmaError: a shard is missing.
        """
        records = [self._record(number) for number in range(len(self._shards))]
        manifest = {
            "rows": sum(record["rows"] for record in records),
            "width": records[0]["width"],
            "dtype": records[0]["dtype"],
            "parts": [
                {"file": self._part(number).name, **{key: record[key] for key in ("rows", "sha256")}}
                for number, record in enumerate(records)
            ],
        }
        _write(self.path / _MANIFEST, _json(manifest))

    def _part(self, number: int) -> Path:
        return self.path / f"part-{number:05}.{self._format}"

    def _record(self, number: int) -> dict[str, Any]:
        """The record of a finished shard, made of the lines that the input still has there."""
        path = self._part(number).with_suffix(".json")
        if not path.exists():
            raise EgemmaError(
                f"{path}: is missing, though all ranks are done. They must share the folder; or bring their parts "
                "together and run the command again"
            )
        record, shard = _read(path), self._shards[number]
        if record["input_sha256"] != shard.sha256:
            raise EgemmaError(
                f"{path}: was made of other lines than those that the input has from line {shard.line} on. Remove "
                "that file to embed them again, or name another folder"
            )
        return record


def open(folder: str | Path) -> Vectors:
    """The vectors of a finished job, memory-mapped, and their ids.

    Raises:
        EgemmaError: the job is not finished, its parts are Parquet, or a part is not what the manifest says.
    """
    folder = Path(folder)
    if not (folder / _MANIFEST).exists():
        raise EgemmaError(f"{folder}: has no {_MANIFEST}: expected the folder of a finished job")
    manifest = _read(folder / _MANIFEST)
    ids: list[Any] = []
    parts: list[NDArray[Any]] = []
    for part in manifest["parts"]:
        path = folder / part["file"]
        if path.suffix != ".npy":
            raise EgemmaError(f"{path}: expected .npy parts; a Parquet reader takes {folder}/*.parquet")
        try:
            vectors = np.load(path, mmap_mode="r")
        except (OSError, ValueError) as error:
            raise EgemmaError(f"{path}: cannot be read ({error})") from None
        named = _read(path.with_suffix(".json"))["ids"]
        if not (vectors.shape == (part["rows"], manifest["width"]) and len(named) == part["rows"]):
            raise EgemmaError(
                f"{path}: expected {part['rows']} ids and rows of {manifest['width']} but got {len(named)} and "
                f"{vectors.shape}"
            )
        ids += named
        parts.append(vectors)
    return Vectors(ids, parts)


def _differences(begun: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for key in sorted({*begun, *now}):
        before, after = begun.get(key), now.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            if changed := [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]:
                yield f"another {key} ({', '.join(changed)})"
        elif before != after:
            yield f"{key} {json.dumps(before)}, not {json.dumps(after)}"


def _npy(vectors: NDArray[Any]) -> bytes:
    file = BytesIO()
    np.save(file, vectors)
    return file.getvalue()


def _parquet(ids: list[Any], vectors: NDArray[Any]) -> bytes:
    """Columns "id", a string whatever the ids are, and "embedding", a list of fixed size."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    values = pa.array(np.ascontiguousarray(vectors).reshape(-1))
    columns = {
        "id": pa.array([name if isinstance(name, str) else json.dumps(name) for name in ids], pa.string()),
        "embedding": pa.FixedSizeListArray.from_arrays(values, vectors.shape[1]),
    }
    file = BytesIO()
    pq.write_table(pa.table(columns), file, use_dictionary=False, compression="zstd")
    return file.getvalue()


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=1).encode() + b"\n"


def _read(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_bytes())
    except ValueError as error:
        raise EgemmaError(f"{path}: not JSON ({error})") from None
    return value


def _write(path: Path, data: bytes) -> None:
    """Put `data` at `path`, all of it or none, whatever happens to the process or the machine meanwhile."""
    with complete(path) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    try:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise EgemmaError(f"{path}: cannot be written ({error.strerror or error})") from error
