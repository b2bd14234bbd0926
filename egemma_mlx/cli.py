"""The `egemma-mlx` command. Nothing heavy is imported before a command runs: `--help` needs no MLX."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import sys
import unicodedata
import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from io import TextIOWrapper
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from egemma_mlx import __version__
from egemma_mlx.errors import EgemmaError

if TYPE_CHECKING:
    from egemma_mlx.config import LayerConfig, VisionConfig
    from egemma_mlx.documents import Corpus, Paragraph, Picture

    Hit = tuple[float, Paragraph | Picture]
    from egemma_mlx.encoder import Encoder
    from egemma_mlx.records import Record

_PROGRAM = "egemma-mlx"
# How the encoder's errors begin where they are about one input: "input 3: …", "prompt + text 3 has …".
_COUNTED = re.compile(r"input (\d+): |((?:prompt \+ )?(?:text|input)) (\d+)")
# Tokens of a piece that search ranks: a paragraph of any usual length, and short enough to point at.
_PIECE_TOKENS = 512


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 1 when `doctor` finds a kernel wrong, 2 for an error (one line
    on stderr), 130 when interrupted."""
    # Raises SystemExit, so that a partial output file is removed.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: _say(f"warning: {message}")
        try:
            arguments = _parser().parse_args(argv)
            code: int | None = arguments.run(arguments)
            sys.stdout.flush()
        except BrokenPipeError:
            # Whoever read the output has had enough; the interpreter's own flush must not fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE
        except KeyboardInterrupt:
            _say("interrupted")
            return 130
        except EgemmaError as error:
            _say(f"error: {error}")
            return 2
        except OSError as error:
            _say(f"error: {error.filename}: {error.strerror}" if error.filename else f"error: {error}")
            return 2
    return code or 0


def _say(message: str) -> None:
    print(f"{_PROGRAM}: {' '.join(message.split())}", file=sys.stderr)


# --- embed -----------------------------------------------------------------------------------------------------------


def embed(arguments: argparse.Namespace) -> None:
    """Texts and images to vectors, on standard output or in a file."""
    from egemma_mlx.records import WRITERS, argument_records, complete, json_lines, read_records

    output: Path | None = arguments.output
    if bool(arguments.items) == (arguments.input is not None):
        raise EgemmaError("expected either TEXT_OR_IMAGE… or --input (see egemma-mlx embed --help)")
    if output is not None and output.suffix.lower() not in WRITERS:
        raise EgemmaError(f"--output {output}: expected a name that ends in {', '.join(WRITERS)}")
    records = argument_records(arguments.items) if arguments.input is None else read_records(arguments.input)
    encoder = _encoder(arguments, images=any(record.images for record in records))
    if output is None:
        sys.stdout.writelines(json_lines(records, _vectors(encoder, records, arguments)))
        return
    # Opened before the work, so that hours of it are not lost to a folder that cannot be written.
    with complete(output) as file:
        WRITERS[output.suffix.lower()](file, records, _vectors(encoder, records, arguments))


def _vectors(encoder: Encoder, records: list[Record], arguments: argparse.Namespace) -> Any:
    from egemma_mlx.records import prompted

    inputs, prompt = prompted(records, encoder.tokenizer, arguments.prompt_name, arguments.prompt)
    try:
        return encoder.encode(
            inputs,
            prompt=prompt,
            truncate_dim=arguments.truncate_dim,
            precision=arguments.precision,
            batch_tokens=arguments.batch_tokens,
            max_soft_tokens=_soft_tokens(encoder, arguments),
            max_length=arguments.max_length,
            truncation=arguments.truncate,
        )
    except EgemmaError as error:
        raise _placed(error, [record.place for record in records]) from None


def _placed(error: EgemmaError, places: Sequence[str]) -> EgemmaError:
    """The encoder counts inputs; whoever wrote a file looks for the line."""
    found = _COUNTED.match(str(error))
    if found is None:
        return error
    return EgemmaError(f"{places[int(found[1] or found[3])]}: {_COUNTED.sub(lambda _: found[2] or '', str(error), 1)}")


# --- search ----------------------------------------------------------------------------------------------------------


def search(arguments: argparse.Namespace) -> None:
    """Images and paragraphs of files, those nearest to a query first."""
    from egemma_mlx import contact_sheet, documents
    from egemma_mlx.records import complete

    sheet: Path | None = arguments.contact_sheet
    if sheet is not None and sheet.suffix.lower() not in contact_sheet.WRITERS:
        raise EgemmaError(f"--contact-sheet {sheet}: expected a name that ends in {', '.join(contact_sheet.WRITERS)}")
    if sheet is not None and (lack := _no_pillow()):
        raise EgemmaError(f"--contact-sheet {sheet}: {lack}")
    query = Path(arguments.query) if documents.names_an_image(arguments.query) else arguments.query
    corpus = documents.read_corpus(arguments.paths, arguments.only, but=sheet)
    if not corpus.paragraphs and not corpus.images:
        raise EgemmaError(f"nothing to search: {_summary(corpus)}")
    _say(_summary(corpus))
    if corpus.images and isinstance(query, str) and corpus.paragraphs and (lack := _no_images(arguments)):
        _say(f"the images are left out: {lack}")
        corpus = corpus._replace(images=[])

    encoder = _encoder(arguments, images=bool(corpus.images) or isinstance(query, Path))
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
    soft_tokens = _soft_tokens(encoder, arguments)
    options: dict[str, Any] = {"batch_tokens": arguments.batch_tokens, "max_soft_tokens": soft_tokens}
    # An image is looked for as the images searched are, so that its copy is the nearest.
    encode_query = encoder.encode_query if isinstance(query, str) else encoder.encode_document
    try:
        near = encode_query(query, prompt_name=arguments.prompt_name, **options)
    except EgemmaError as refused:
        raise _placed(refused, ["query"]) from None
    found = encoder.encode(inputs, prompt="", on_error="skip", **options)
    for _, error in sorted(found.errors.items()):
        _say(f"skipped {_COUNTED.sub('', str(error), 1)}")
    if found.errors:
        _say(f"{len(found.errors)} of {len(corpus.images)} images are skipped")
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


# --- info ------------------------------------------------------------------------------------------------------------


def info(arguments: argparse.Namespace) -> None:
    """What a checkpoint holds and what would run it, without loading its weights."""
    from dataclasses import asdict
    from importlib.metadata import version

    from egemma_mlx import blas, checkpoint
    from egemma_mlx.config import Config
    from egemma_mlx.kernels.approx import on_cpu
    from egemma_mlx.kernels.backend import picked
    from egemma_mlx.tokenizer import Tokenizer

    folder = checkpoint.resolve(arguments.model, arguments.revision)
    config = Config.from_file(folder / "config.json")
    tokenizer = Tokenizer.from_folder(folder, config)
    library, device = blas.current(), "cpu" if on_cpu() else "gpu"
    facts: dict[str, Any] = {
        "version": __version__,
        "model": str(folder),
        "config": asdict(config),
        "parameters": checkpoint.tower_sizes(folder, config),
        "files": {file.name: file.stat().st_size for file in sorted(folder.glob("*.safetensors"))},
        "vocabulary": len(tokenizer),
        "max_tokens": tokenizer.max_length,
        "prompts": dict(tokenizer.prompts),
        "default_prompt_name": tokenizer.default_prompt_name,
        "mlx": version("mlx"),
        "device": device,
        "kernels": picked(arguments.backend),
        "blas": asdict(library),
    }
    if arguments.json:
        print(json.dumps(facts))
        return
    text = config.text
    rows = [
        ("model", str(folder)),
        ("files", _listed(f"{name} {size / 1e6:,.1f} MB" for name, size in facts["files"].items())),
        ("parameters", _listed(f"{tower} {count:,}" for tower, count in facts["parameters"].items())),
        ("text", f"{text.num_hidden_layers} layers of width {text.hidden_size}, vectors of {text.embedding_dim}"),
        *(("attention", _attention(layer, count)) for layer, count in Counter(text.layers).items()),
        ("images", _tower(config.vision)),
        ("tokens", f"at most {tokenizer.max_length:,} a text, vocabulary {len(tokenizer):,}"),
        ("prompts", f"{_listed(tokenizer.prompts)} (default: {tokenizer.default_prompt_name or 'none'})"),
        ("runs on", f"MLX {version('mlx')} on the {device}, kernels {facts['kernels']}"),
        ("BLAS", f"{library.name}, {library.path or 'no library loaded'} ({library.reason})"),
    ]
    sys.stdout.writelines(f"{name:<12}{value}\n" for name, value in rows)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def _tower(vision: VisionConfig | None) -> str:
    if vision is None:
        return "none: this checkpoint has no such tower"
    side = vision.patch_size * vision.pooling_kernel_size
    return (
        f"{vision.num_hidden_layers} layers of width {vision.hidden_size}, {vision.num_attention_heads} heads of "
        f"{vision.head_dim}; a token for {side}×{side} pixels"
    )


def _attention(layer: LayerConfig, count: int) -> str:
    reach = "full" if layer.window is None else f"within ±{layer.window} tokens"
    return f"{count} layers {reach}: {layer.heads} heads over {layer.kv_heads} of {layer.head_dim}"


# --- doctor ----------------------------------------------------------------------------------------------------------


def doctor(arguments: argparse.Namespace) -> int:
    """What this machine is, and whether the kernels are right on it; 1 when one is not."""
    from egemma_mlx import checkpoint
    from egemma_mlx import doctor as report
    from egemma_mlx.config import Config
    from egemma_mlx.kernels.selfcheck import PUBLISHED, Widths

    widths = PUBLISHED
    if arguments.model is not None:
        folder = checkpoint.resolve(arguments.model, arguments.revision)
        config = Config.from_file(folder / "config.json")
        widths = Widths.of(config.text, config.vision)
    dump: Path | None = arguments.dump_msl
    files = [] if dump is None else report.dump_msl(dump, widths)
    machine, examined = report.facts(), report.examine(widths, simulator=arguments.simulator)
    if arguments.json:
        print(json.dumps(report.as_json(machine, examined, files)))
    else:
        print(report.as_text(machine, examined), end="")
        if dump is not None:
            print(f"{len(files)} kernels are in {dump}. Apple's compiler reads them, where Xcode is, with")
            print(f"    {report.compile_command(dump)}")
    return int(examined is not None and any(verdict.problem for verdict in examined[1]))


# --- export ----------------------------------------------------------------------------------------------------------


def export(arguments: argparse.Namespace) -> None:
    """The compiled forward as a file for MLX in Swift, C++ and Python."""
    from egemma_mlx import checkpoint
    from egemma_mlx.export import export_forward

    folder = checkpoint.resolve(arguments.model, arguments.revision)
    out, tokens, segments = arguments.out, arguments.tokens, arguments.segments
    export_forward(folder, out, tokens=tokens, segments=segments, backend=arguments.backend)
    size = out.stat().st_size / 1e6
    print(f"{out}: tokens {tokens}, segments {segments}, kernels {arguments.backend}, {size:,.1f} MB")


# --- bench -----------------------------------------------------------------------------------------------------------


def bench(arguments: argparse.Namespace) -> None:
    """How fast this device is, beside plain MLX operations and its own ceilings."""
    from egemma_mlx.bench import device

    device.run(arguments)


# --- checkpoint ------------------------------------------------------------------------------------------------------


def checkpoint(arguments: argparse.Namespace) -> None:
    """A random checkpoint in the official layout, for tests and benchmarks."""
    from egemma_mlx.random_checkpoint import write_checkpoint

    folder = write_checkpoint(
        arguments.out, arguments.size, modalities=arguments.modalities, seed=arguments.seed, dtype=arguments.dtype
    )
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{folder}: {arguments.size} random checkpoint, {size / 1e6:,.1f} MB")


# --- arguments -------------------------------------------------------------------------------------------------------


def _encoder(arguments: argparse.Namespace, images: bool = False) -> Encoder:
    from egemma_mlx.encoder import Encoder

    if images and (lack := _no_images(arguments)):
        raise EgemmaError(lack)
    return Encoder(
        arguments.model,
        revision=arguments.revision,
        modalities=("text", "image") if images else ("text",),
        backend=arguments.backend,
        precision=arguments.compute_precision,
    )


def _soft_tokens(encoder: Encoder, arguments: argparse.Namespace) -> int | None:
    return None if encoder.image_processor is None else arguments.max_soft_tokens


def _no_images(arguments: argparse.Namespace) -> str | None:
    """What keeps images from being embedded, if anything."""
    from egemma_mlx import checkpoint
    from egemma_mlx.config import Config

    if lack := _no_pillow():
        return lack
    folder = checkpoint.resolve(arguments.model, arguments.revision)
    if Config.from_file(folder / "config.json").vision:
        return None
    return f"{folder} has no image tower; {checkpoint.DEFAULT_MODEL} has (`{checkpoint.GET_REAL}`)"


def _no_pillow() -> str | None:
    return None if find_spec("PIL") else "images need Pillow: pip install 'egemma-mlx[image]'"


def _count(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"expected a positive integer but got {text!r}")
    return int(text)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise EgemmaError(f"{message} (see {self.prog} --help)")


# By the argument; by command and argument where a command means something else by it.
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "items": {"nargs": "*", "metavar": "TEXT_OR_IMAGE", "help": "texts and image files (photo.jpg) to embed"},
    "query": {"metavar": "QUERY", "help": "a text, or an image file"},
    "paths": {"nargs": "+", "metavar": "FILE_OR_FOLDER"},
    "out": {"type": Path, "metavar": "OUT", "help": "new or empty folder"},
    "--input": {"metavar": "FILE", "help": ".txt (a text a line), .jsonl (a string or object a line) or - (lines)"},
    "--only": {"choices": ("images", "text"), "help": "leave files of the other kind out"},
    "--contact-sheet": {
        "type": Path,
        "metavar": "FILE",
        "help": "write the results as a picture (.png) or a page that holds its own thumbnails (.html)",
    },
    "--output": {"type": Path, "metavar": "FILE", "help": ".npy, .npz or .jsonl (default: JSON lines to print)"},
    "--prompt-name": {"metavar": "NAME", "help": "one of the checkpoint's prompts (default for search: query)"},
    "--prompt": {"metavar": "TEXT", "help": "text put before each input; wins over --prompt-name"},
    "--truncate-dim": {"type": _count, "metavar": "D", "help": "keep D components, normalised again"},
    "--precision": {"choices": ("float32", "int8", "uint8", "binary", "ubinary"), "default": "float32"},
    "--batch-tokens": {"type": _count, "metavar": "N", "help": "most tokens of one forward: memory goes with it"},
    "--max-soft-tokens": {
        "type": int,
        "choices": (70, 140, 280, 560, 1120),
        "help": "of an image: its resolution, and most of its cost (default: the checkpoint's, 280)",
    },
    "--max-length": {"type": _count, "metavar": "N", "help": "most tokens of a text (default: what the model takes)"},
    "--truncate": {"action": "store_true", "help": "cut longer texts instead of refusing them"},
    "--top": {"type": _count, "default": 10, "metavar": "K", "help": "results to print (default: 10)"},
    "--json": {"action": "store_true", "help": "print JSON"},
    "--size": {"choices": ("tiny", "full"), "default": "tiny", "help": "full: the published shapes, 1.5 GB"},
    "--modalities": {"nargs": "+", "choices": ("text", "image", "audio"), "default": ("text", "image", "audio")},
    "--seed": {"type": int, "default": 0},
    "--backend": {
        "choices": ("auto", "metal", "ops", "simulator"),
        "default": "auto",
        "help": "metal: this package's kernels; ops: MLX's own operations; simulator: the kernels on the CPU, slowly, "
        "with every check; auto: metal where there is an Apple GPU, else ops",
    },
    "--compute-precision": {
        "choices": ("float32", "bfloat16"),
        "default": "float32",
        "help": "of products with weights: float32 (default, exact) or bfloat16 (for GPUs with matrix units)",
    },
    "bench --compute-precision": {
        "choices": ("float32", "bfloat16"),
        "nargs": "+",
        "help": "of this package (default: both; on a CPU float32)",
    },
    "bench --backend": {
        "choices": ("auto", "metal", "ops"),
        "default": "auto",
        "help": "measured beside ops, MLX's own operations; auto: metal where there is an Apple GPU, else ops",
    },
    "bench --model": {"metavar": "PATH_OR_REPO", "help": "checkpoint (default: random weights in the published sizes)"},
    "--workloads": {
        "nargs": "+",
        "metavar": "NAME",
        "help": "32x512 (texts, tokens of each), mixed (1,000 texts of 3 to 512) or mixed:40 (texts)",
    },
    "--rounds": {"type": _count, "metavar": "N", "help": "default: 3 to 20, for ten seconds each"},
    "export out": {"type": Path, "metavar": "OUT.mlxfn"},
    "export --backend": {
        "choices": ("metal", "ops"),
        "default": "metal",
        "help": "metal (default): this package's kernels, for Apple GPUs; ops: MLX's own operations, for this machine",
    },
    "--tokens": {"type": _count, "metavar": "N", "required": True, "help": "rows of the packed batch"},
    "--segments": {"type": _count, "metavar": "S", "default": 1, "help": "texts of the batch (default: 1)"},
    "--simulator": {"action": "store_true", "help": "run the kernels on the CPU, without an Apple GPU"},
    "--dump-msl": {"type": Path, "metavar": "DIR", "help": "write the source of every kernel into a new folder"},
    "doctor --model": {"metavar": "PATH_OR_REPO", "help": "check at its widths (default: those of embeddinggemma-2)"},
    "--dtype": {"choices": ("bfloat16", "float32"), "default": "bfloat16"},
    "--model": {
        "metavar": "PATH_OR_REPO",
        "help": "a folder, a hub id or mini, the small stand-in in this package (default: $EGEMMA_MODEL, else "
        "google/embeddinggemma-2 if the hub's cache has it, else mini)",
    },
    "--revision": {"help": "branch, tag or commit of the hub repository"},
}
# Command, its summary, its details, its arguments.
_COMMANDS: tuple[tuple[Callable[[argparse.Namespace], int | None], str, str, str], ...] = (
    (
        embed,
        "Print or store the vectors of texts and images.",
        'A .jsonl line is a string, or an object with "text", "image" (a path relative to the file, or an array of '
        'them) or both in their order, and whatever else, which comes out again with "embedding" added. When objects '
        'have a "title", all of the input is documents, each embedded as `title: … | text: …` (without one: none), and '
        "no prompt but the document prompt may be asked for. Row i of a .npy is input i. An .npz holds "
        '"embeddings" and, as strings, "ids" (if every line has one) or else "texts" and, where there are any, '
        '"images". An output file is complete or absent.',
        "items --input --output --prompt-name --prompt --truncate-dim --precision --batch-tokens "
        "--max-soft-tokens --max-length --truncate --backend --compute-precision --model --revision",
    ),
    (
        search,
        "Rank images and the paragraphs of text files by how near they are to a query.",
        "Folders are read without hidden files, data (.csv, .json, …) and whatever is neither an image by its name "
        "(.jpg, .png, .webp, .gif, .bmp, .tiff) nor UTF-8 text. Images that cannot be read are skipped, each with a "
        "line.",
        "query paths --top --only --contact-sheet --prompt-name --batch-tokens --max-soft-tokens --json --backend "
        "--compute-precision --model --revision",
    ),
    (
        info,
        "Show a checkpoint's configuration, towers and sizes, and what would run it.",
        "No weights are loaded.",
        "--json --backend --model --revision",
    ),
    (
        doctor,
        "Show what this machine is, and check the kernels on it.",
        "Every Metal kernel runs once and is compared with float64; the exit code is 1 when one fails. The output is "
        "Markdown, for an issue.",
        "--simulator --dump-msl --json --model --revision",
    ),
    (
        export,
        "Write the compiled forward, weights included, as a file for MLX in Swift, C++ and Python.",
        "The function in it takes int32 arrays tokens [N], positions [N] (-1: no token) and segments [S, 2] (start, "
        "length), and returns unit vectors [S, dim]. The file is complete or absent.",
        "out --tokens --segments --backend --model --revision",
    ),
    (
        bench,
        "Measure this device: forwards, kernels, memory.",
        "Beside plain MLX operations, the device's ceilings and, where it is installed, mlx-vlm. It takes minutes; the "
        "output is Markdown, for an issue.",
        "--workloads --rounds --backend --compute-precision --model --json",
    ),
    (
        checkpoint,
        "Write a random checkpoint in the official layout, for tests and benchmarks.",
        "Its vectors mean nothing.",
        "out --size --modalities --seed --dtype",
    ),
)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=_PROGRAM, description="Embeddings by EmbeddingGemma 2 on MLX.")
    parser.add_argument("--version", action="version", version=f"{_PROGRAM} {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for run, summary, details, _ in _COMMANDS:
        command = commands.add_parser(run.__name__, help=summary, description=f"{summary} {details}")
        command.set_defaults(run=run)
        add_arguments(command, run.__name__)
    return parser


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """The arguments of a command, for whatever else starts it."""
    (arguments,) = (arguments for run, _, _, arguments in _COMMANDS if run.__name__ == command)
    for argument in arguments.split():
        own = f"{command} {argument}"
        parser.add_argument(argument, **_ARGUMENTS[own if own in _ARGUMENTS else argument])


if __name__ == "__main__":
    sys.exit(main())
