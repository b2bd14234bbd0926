"""Vectors of corpora: a file of records, of any length, to a folder of shards.

    egemma_mlx.corpus.embed("corpus.jsonl", "out")      # again after a kill: it goes on
    vectors = egemma_mlx.corpus.open("out")             # .ids, and .parts: memory-mapped arrays

A shard is a run of lines, and is embedded on its own: its bytes do not depend on what else the process embeds, nor on
how many processes share the work.
"""

from __future__ import annotations

import hashlib
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from egemma_mlx.corpus.folder import FORMATS, Folder, Format, Vectors, open
from egemma_mlx.corpus.ranks import join
from egemma_mlx.corpus.source import scan
from egemma_mlx.errors import EgemmaError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tqdm import tqdm

    from egemma_mlx.encoder import Encoder
    from egemma_mlx.kernels.backend import Backend
    from egemma_mlx.loading import Precision as ComputePrecision
    from egemma_mlx.records import Record
    from egemma_mlx.vectors import Precision

__all__ = ["FORMATS", "SHARD_ROWS", "Format", "Vectors", "embed", "open"]

SHARD_ROWS = 4096
"""Rows of a shard, unless the caller says: 12 MB of float32, and batches enough to keep a GPU or many cores busy."""
# Their steps between the least and the greatest value would be another shard's each time.
_RANGED = ("int8", "uint8")
_BAR_DELAY = 2.0  # seconds before a progress bar shows that was not asked for


def embed(
    source: str | Path,
    output: str | Path,
    path_or_hf_repo: str | Path | None = None,
    *,
    revision: str | None = None,
    prompt_name: str | None = None,
    prompt: str | None = None,
    truncate_dim: int | None = None,
    precision: Precision = "float32",
    batch_tokens: int | None = None,
    max_length: int | None = None,
    truncation: bool = False,
    max_soft_tokens: int | None = None,
    backend: Backend = "auto",
    compute_precision: ComputePrecision = "float32",
    shard_rows: int = SHARD_ROWS,
    file_format: Format = "npy",
    show_progress_bar: bool | None = None,
) -> None:
    """Embed every record of a file into a folder of shards (`egemma_mlx.corpus.folder` says what is in it).

    Into a folder of the same job it embeds what is missing there: after a kill, the shards that were in work. Under
    `mlx.launch` each rank makes every size-th shard, into one folder that all ranks see, and all return when all are
    done.

    Args:
        source: .txt (a text a line) or .jsonl (a string or an object a line, as `egemma-mlx embed --help` says). Every
            line is checked before the first is embedded.
        output: a new or empty folder, or one of the same job.
        path_or_hf_repo, revision, backend, compute_precision: of the model, as `egemma_mlx.load` has them. The image
            tower is loaded where a record has an image.
        prompt_name, prompt: before every record, as `Encoder.encode` has them. Where any record has a title, all are
            documents, and it may only be the document prompt.
        truncate_dim, batch_tokens, max_length, truncation, max_soft_tokens: as `Encoder.encode` has them.
        precision: of the vectors, "float32", "binary" or "ubinary".
        shard_rows: records of a shard. A run holds one shard in memory, and a kill loses it.
        file_format: "npy", or "parquet" (needs pyarrow).
        show_progress_bar: of rank 0. None: on a terminal, once it has taken two seconds.

    Raises:
        EgemmaError: an option, a line or an image, named; a folder of something else; another rank was lost. Finished
            shards stay.
        OSError: the input cannot be read.
    """
    from egemma_mlx import blas, checkpoint, vectors
    from egemma_mlx.config import Config
    from egemma_mlx.records import prompted
    from egemma_mlx.tokenizer import Tokenizer

    model = checkpoint.resolve(path_or_hf_repo, revision)
    config = Config.from_file(model / "config.json")
    tokenizer = Tokenizer.from_folder(model, config)
    vectors.check(config.text.embedding_dim, truncate_dim, precision)
    _check(precision, shard_rows, file_format)

    ranks = join()
    quiet = ranks.rank > 0 or (not sys.stderr.isatty() if show_progress_bar is None else not show_progress_bar)
    delay = 0.0 if show_progress_bar else _BAR_DELAY
    size = Path(source).stat().st_size if Path(source).is_file() else 0
    with _bar(size, "B", quiet, delay) as bar:
        found = scan(str(source), shard_rows, bar.update)
    if found.titled:
        prompted([found.titled], tokenizer, prompt_name, prompt)  # raises where it cannot carry a title
        prefix = tokenizer.document("")
    else:
        prefix = tokenizer.prompt(prompt_name, prompt)

    # What a row means. Memory and place (batch_tokens, backend) move no more than its rounding, and truncation is an
    # error until it is allowed, so that those may change when a run resumes.
    job = {
        "model": _fingerprint(model),
        "compute_precision": compute_precision,
        "prompt": prefix,
        "truncate_dim": truncate_dim,
        "precision": precision,
        "max_length": max_length,
        "max_soft_tokens": max_soft_tokens if found.has_images else None,
        "ids": "id" if found.has_ids else "line",
        "file_format": file_format,
        "shard_rows": shard_rows,
    }
    folder = Folder(Path(output), found.shards, file_format)
    if ranks.rank == 0:
        folder.begin(job)
    ranks.wait_for_all()
    missing = folder.resume(job, ranks.share(len(found.shards)))
    if missing:
        from egemma_mlx.encoder import Encoder

        encoder = Encoder(
            model,
            modalities=("text", "image") if found.has_images else ("text",),
            backend=backend,
            precision=compute_precision,
        )
        options = {
            "truncate_dim": truncate_dim,
            "precision": precision,
            "batch_tokens": batch_tokens,
            "max_length": max_length,
            "truncation": truncation,
            "max_soft_tokens": max_soft_tokens if found.has_images else None,
        }
        total = sum(found.shards[number].rows for number in missing)
        with _bar(total, "input", quiet, delay) as bar, blas.one_thread():
            for number in missing:
                records, ids = found.read(number)
                folder.add(number, ids, _embedded(encoder, records, prefix, options))
                bar.update(len(records))
    ranks.wait_for_all()
    if ranks.rank == 0:
        folder.finish()


def _check(precision: str, shard_rows: int, file_format: str) -> None:
    if precision in _RANGED:
        raise EgemmaError(
            f"precision {precision!r} takes its ranges from all vectors, which a shard has not: expected float32, "
            "binary or ubinary"
        )
    if isinstance(shard_rows, bool) or not isinstance(shard_rows, int) or shard_rows < 1:
        raise EgemmaError(f"expected shard_rows to be a positive integer but got {shard_rows!r}")
    if file_format not in FORMATS:
        raise EgemmaError(f"expected file_format to be one of {', '.join(FORMATS)} but got {file_format!r}")
    if file_format == "parquet" and not find_spec("pyarrow"):
        raise EgemmaError("parquet needs pyarrow: pip install 'egemma-mlx[parquet]'")


def _embedded(encoder: Encoder, records: list[Record], prompt: str, options: dict[str, Any]) -> NDArray[Any]:
    from egemma_mlx.records import placed, prompted

    inputs, prefix = prompted(records, encoder.tokenizer, None, prompt)
    try:
        rows: NDArray[Any] = encoder.encode(inputs, prompt=prefix, show_progress_bar=False, **options)
    except EgemmaError as error:
        raise placed(error, [record.place for record in records]) from None
    return rows


def _fingerprint(model: Path) -> dict[str, str]:
    """SHA-256 of every file that the vectors may depend on."""
    files = sorted(path for pattern in ("*.json", "*.safetensors") for path in model.glob(pattern))
    return {path.name: _sha256(path) for path in files}


def _sha256(path: Path) -> str:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(1 << 20))
    with path.open("rb") as file:
        while size := file.readinto(buffer):
            digest.update(buffer[:size])
    return digest.hexdigest()


def _bar(total: int, unit: str, quiet: bool, delay: float) -> tqdm[Any]:
    from tqdm.auto import tqdm

    return tqdm(total=total, unit=unit, unit_scale=unit == "B", delay=delay, disable=quiet)
