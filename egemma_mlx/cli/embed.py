"""Print or store the vectors of texts and images.

A .jsonl line is a string, or an object with "text", "image" (a path relative to the file, or an array of them) or both
in their order, and whatever else, which comes out again with "embedding" added. When objects have a "title", all of the
input is documents, each embedded as `title: … | text: …` (without one: none), and no prompt but the document prompt may
be asked for. Row i of a .npy is input i. An .npz holds "embeddings" and, as strings, "ids" (if every line has one) or
else "texts" and, where there are any, "images". An output file is complete or absent.

An output that is a folder (`out/`, or a name without a suffix) gets shards of --input, part-00000.npy and
part-00000.json with their ids, and at last manifest.json. The same command again makes what a killed run did not;
`mlx.launch -n 2 -- egemma-mlx embed …` shares the shards among processes, or machines that share the folder.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from egemma_mlx.cli import common
from egemma_mlx.cli.arguments import add_shared, count
from egemma_mlx.errors import EgemmaError

if TYPE_CHECKING:
    from egemma_mlx.encoder import Encoder
    from egemma_mlx.records import Record


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("items", nargs="*", metavar="TEXT_OR_IMAGE", help="texts and image files (photo.jpg) to embed")
    parser.add_argument(
        "--input", metavar="FILE", help=".txt (a text a line), .jsonl (a string or object a line) or - (lines)"
    )
    parser.add_argument(
        "--output", metavar="FILE", help=".npy, .npz, .jsonl, or a folder (default: JSON lines to print)"
    )
    parser.add_argument("--shard-rows", type=count, metavar="N", help="of a folder: records of a shard (default: 4096)")
    parser.add_argument("--shard-format", choices=("npy", "parquet"), help="of a folder (default: npy)")
    add_shared(parser, "--prompt-name")
    parser.add_argument("--prompt", metavar="TEXT", help="text put before each input; wins over --prompt-name")
    parser.add_argument("--truncate-dim", type=count, metavar="D", help="keep D components, normalised again")
    parser.add_argument("--precision", choices=("float32", "int8", "uint8", "binary", "ubinary"), default="float32")
    add_shared(parser, "--batch-tokens", "--max-soft-tokens")
    parser.add_argument(
        "--max-length", type=count, metavar="N", help="most tokens of a text (default: what the model takes)"
    )
    parser.add_argument("--truncate", action="store_true", help="cut longer texts instead of refusing them")
    add_shared(parser, "--backend", "--compute-precision", "--model", "--revision")


def run(arguments: argparse.Namespace) -> None:
    from egemma_mlx.records import WRITERS, argument_records, complete, json_lines, read_records

    if bool(arguments.items) == (arguments.input is not None):
        raise EgemmaError("expected either TEXT_OR_IMAGE… or --input (see egemma-mlx embed --help)")
    output = None if arguments.output is None else Path(arguments.output)
    if output is not None and arguments.input is not None and _is_folder(arguments.output):
        _embed_corpus(arguments)
        return
    if arguments.shard_rows or arguments.shard_format:
        raise EgemmaError("--shard-rows and --shard-format are about a folder: expected --input FILE --output FOLDER/")
    if output is not None and output.suffix.lower() not in WRITERS:
        folder = " (or, for a folder, --input)" if _is_folder(arguments.output) else ""
        raise EgemmaError(f"--output {output}: expected a name that ends in {', '.join(WRITERS)}{folder}")
    records = argument_records(arguments.items) if arguments.input is None else read_records(arguments.input)
    encoder = common.encoder(arguments, images=any(record.images for record in records))
    if output is None:
        sys.stdout.writelines(json_lines(records, _vectors(encoder, records, arguments)))
        return
    # Opened before the work, so that hours of it are not lost to a folder that cannot be written.
    with complete(output) as file:
        WRITERS[output.suffix.lower()](file, records, _vectors(encoder, records, arguments))


def _is_folder(output: str) -> bool:
    from egemma_mlx.records import WRITERS

    path = Path(output)
    nameless = path.suffix.lower() not in WRITERS and (path.is_dir() or "." not in path.name)
    return output.endswith("/") or nameless


def _embed_corpus(arguments: argparse.Namespace) -> None:
    from egemma_mlx import corpus

    corpus.embed(
        arguments.input,
        arguments.output,
        arguments.model,
        revision=arguments.revision,
        prompt_name=arguments.prompt_name,
        prompt=arguments.prompt,
        truncate_dim=arguments.truncate_dim,
        precision=arguments.precision,
        batch_tokens=arguments.batch_tokens,
        max_length=arguments.max_length,
        truncation=arguments.truncate,
        max_soft_tokens=arguments.max_soft_tokens,
        backend=arguments.backend,
        compute_precision=arguments.compute_precision,
        shard_rows=arguments.shard_rows or corpus.SHARD_ROWS,
        file_format=arguments.shard_format or "npy",
    )


def _vectors(encoder: Encoder, records: list[Record], arguments: argparse.Namespace) -> Any:
    from egemma_mlx.records import placed, prompted

    inputs, prompt = prompted(records, encoder.tokenizer, arguments.prompt_name, arguments.prompt)
    try:
        return encoder.encode(
            inputs,
            prompt=prompt,
            truncate_dim=arguments.truncate_dim,
            precision=arguments.precision,
            batch_tokens=arguments.batch_tokens,
            max_soft_tokens=common.soft_tokens(encoder, arguments),
            max_length=arguments.max_length,
            truncation=arguments.truncate,
        )
    except EgemmaError as error:
        raise placed(error, [record.place for record in records]) from None
