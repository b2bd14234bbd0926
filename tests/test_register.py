"""mlx-embeddings and mlx-vlm themselves, with this package's model in them, against `Encoder`."""

import copy
import importlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import mlx.core as mx
import numpy as np
import oracle  # noqa: F401  # makes torchvision import beside a CPU torch
import pytest
from pages import TORCHVISION
from PIL import Image

from egemma_mlx import checkpoint, layouts
from egemma_mlx.config import MODEL_TYPE, Config
from egemma_mlx.dropin import register
from egemma_mlx.dropin.mlx_embeddings import Processor
from egemma_mlx.encoder import Encoder
from egemma_mlx.errors import EgemmaError
from egemma_mlx.random_checkpoint import write_checkpoint

ROOT = Path(__file__).parents[1]
PACKAGES = ("mlx_embeddings", "mlx_vlm")
TEXTS = ["I like grapes", "I like fruits", "The slow green turtle crawls under the busy ant.", ""]

installed = pytest.mark.skipif(
    any(find_spec(package) is None for package in PACKAGES),
    reason="pip install --no-deps mlx-embeddings mlx-vlm; pip install requests",
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("register") / "tiny", "tiny")


@pytest.fixture(scope="module")
def encoder(tiny: Path) -> Encoder:
    return Encoder(tiny, modalities=("text", "image"))


@pytest.fixture(scope="module")
def pictures() -> list[Image.Image]:
    values = np.random.default_rng(0)
    sizes = [(60, 90, 3), (120, 70, 3)]
    return [Image.fromarray(values.integers(0, 256, size, dtype=np.uint8)) for size in sizes]


@pytest.fixture
def packages() -> Iterator[None]:
    """Ends with the test: what it registers, and what mlx-vlm's own model does to transformers when it is imported."""
    from transformers import AutoProcessor

    from_pretrained = vars(AutoProcessor)["from_pretrained"]
    yield
    AutoProcessor.from_pretrained = from_pretrained
    for package in PACKAGES:
        name = f"{package}.models.{MODEL_TYPE}"
        for module in [module for module in sys.modules if f"{module}.".startswith(f"{name}.")]:
            del sys.modules[module]
        if parent := sys.modules.get(f"{package}.models"):
            vars(parent).pop(MODEL_TYPE, None)


def close(got: Any, expected: Any) -> bool:
    return np.abs(np.array(got) - np.array(expected)).max() <= 2e-6


def least_cosine(a: Any, b: Any) -> float:
    return float((np.array(a) * np.array(b)).sum(axis=1).min())


def rewritten(folder: Path, source: Path, weights: dict[str, mx.array]) -> Path:
    """The checkpoint `source` with other weights."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


# --- mlx-embeddings --------------------------------------------------------------------------------------------------


@installed
@pytest.mark.usefixtures("packages")
def test_generate_gives_the_encoder_s_vectors(tiny: Path, encoder: Encoder) -> None:
    import mlx_embeddings

    register()
    model, tokenizer = mlx_embeddings.load(str(tiny))
    output = mlx_embeddings.generate(model, tokenizer, TEXTS)
    assert close(output.text_embeds, encoder.encode(TEXTS))
    assert close(output.pooler_output, encoder.encode(TEXTS, normalize_embeddings=False))
    assert output.last_hidden_state.shape[:2] == tokenizer(TEXTS, padding=True, return_tensors="np")["input_ids"].shape
    for text in TEXTS:
        assert close(mlx_embeddings.generate(model, tokenizer, text).text_embeds[0], encoder.encode(text))

    long = ["word " * 600]
    with pytest.warns(UserWarning, match="1 of 1 texts cut to 512 tokens"):
        cut = mlx_embeddings.generate(model, tokenizer, long)
    with pytest.warns(UserWarning, match="cut to 512"):
        assert close(cut.text_embeds, encoder.encode(long, truncation=True, max_length=512))


@installed
def test_registered_before_the_package_is_imported(tiny: Path, encoder: Encoder) -> None:
    code = f"""
        import sys
        from egemma_mlx.dropin import register
        assert not {{"mlx_embeddings", "mlx_vlm", "transformers"}} & sys.modules.keys()
        register()
        import mlx_embeddings.models.embedding_gemma2
        from mlx_embeddings.models import embedding_gemma2
        model, tokenizer = mlx_embeddings.load({str(tiny)!r})
        assert type(model) is mlx_embeddings.models.embedding_gemma2.Model is embedding_gemma2.Model
        print(mlx_embeddings.generate(model, tokenizer, {TEXTS[0]!r}).text_embeds[0].tolist())
    """
    lines = "\n".join(line.strip() for line in code.splitlines())
    ran = subprocess.run(
        [sys.executable, "-c", TORCHVISION + lines], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert close(np.fromstring(ran.stdout.strip("[]\n"), sep=","), encoder.encode(TEXTS[0]))


def readme_example(marker: str, model: Path) -> dict[str, Any]:
    """What mlx-embeddings' README's example that has `marker` leaves behind, run with another model."""
    readme = metadata("mlx-embeddings").json["description"]
    (example,) = [block for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if marker in block]
    code, models = re.subn(r'"mlx-community/[^"]*"', repr(str(model)), example)
    assert models == 1
    variables: dict[str, Any] = {}
    exec(code, variables)
    return variables


@installed
@pytest.mark.usefixtures("packages")
def test_the_readme_s_text_example_runs_unchanged(tiny: Path, encoder: Encoder) -> None:
    register()
    left = readme_example("I like reading", tiny)
    assert close(left["text_embeds"][0], encoder.encode(left["text"]))
    assert left["raw_embeds"].shape == (1, encoder.get_embedding_dimension())


@installed
@pytest.mark.usefixtures("packages")
def test_the_readme_s_similarity_example_runs_unchanged(
    tiny: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sklearn")
    for drawing in ("matplotlib", "matplotlib.pyplot", "seaborn"):
        monkeypatch.setitem(sys.modules, drawing, MagicMock())
    register()
    left = readme_example("compute_and_print_similarity", tiny)
    expected = encoder.encode(left["texts"])
    assert len(left["texts"]) == 3
    assert close(left["similarity_matrix"], encoder.similarity(expected, expected))


@installed
@pytest.mark.usefixtures("packages")
def test_images(tiny: Path, encoder: Encoder, pictures: list[Image.Image], tmp_path: Path) -> None:
    import mlx_embeddings

    register()
    model, processor = mlx_embeddings.load(str(tiny))
    pictures[1].save(tmp_path / "second.png")
    images = [pictures[0], str(tmp_path / "second.png")]
    output = mlx_embeddings.generate(model, processor, ["<|image|>a cat", "two: <|image|>"], images=images)
    inputs = [{"image": pictures[0], "text": "a cat"}, {"text": "two: ", "image": pictures[1]}]
    assert close(output.text_embeds, encoder.encode(inputs))
    assert close(mlx_embeddings.generate(model, processor, None, images=images).text_embeds, encoder.encode(pictures))
    with pytest.raises(EgemmaError, match=r"2 images and 1 <\|image\|> in 2 texts"):
        mlx_embeddings.generate(model, processor, ["<|image|>", "no image"], images=images)


@installed
@pytest.mark.usefixtures("packages")
def test_weights_under_other_names(tiny: Path, encoder: Encoder, tmp_path: Path) -> None:
    import mlx_embeddings

    register()
    weights = mx.load(str(tiny / "model.safetensors"))
    prefixed = {f"model.{name}": array for name, array in weights.items()}
    model, tokenizer = mlx_embeddings.load(str(rewritten(tmp_path / "prefixed", tiny, prefixed)))
    assert close(mlx_embeddings.generate(model, tokenizer, TEXTS).text_embeds, encoder.encode(TEXTS))

    odd = rewritten(tmp_path / "odd", tiny, {**weights, "lm_head.weight": mx.zeros((2, 2))})
    with pytest.raises(EgemmaError, match=r"lm_head\.weight"):
        mlx_embeddings.load(str(odd))


@installed
@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(
    ("options", "at_least"),
    [({}, 1 - 1e-6), ({"dtype": "bfloat16"}, 1 - 1e-6), ({"quantize": True, "q_bits": 8, "q_group_size": 32}, 0.999)],
    ids=["float16", "bfloat16", "8 bits"],
)
def test_what_convert_writes_loads(
    tiny: Path, encoder: Encoder, tmp_path: Path, options: dict[str, Any], at_least: float
) -> None:
    import mlx_embeddings

    register()
    mlx_embeddings.convert(str(tiny), str(tmp_path / "converted"), **options)
    model, tokenizer = mlx_embeddings.load(str(tmp_path / "converted"))
    vectors = mlx_embeddings.generate(model, tokenizer, TEXTS).text_embeds
    assert least_cosine(vectors, encoder.encode(TEXTS)) > at_least


@installed
@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(("mode", "bits"), [("affine", 8), ("affine", 4), ("mxfp8", 8)])
def test_quantised_in_memory_and_saved_are_the_same(tiny: Path, tmp_path: Path, mode: str, bits: int) -> None:
    import mlx_embeddings
    from mlx_embeddings.convert import quantize_model
    from mlx_embeddings.utils import load_config, save_config, save_weights

    register()
    model, tokenizer = mlx_embeddings.load(str(tiny))
    plain = mlx_embeddings.generate(model, tokenizer, TEXTS).text_embeds
    mx.eval(plain)
    weights, config = quantize_model(model, load_config(tiny), 32, bits, mode)
    assert "language_model.layers.0.self_attn.q_proj.scales" in weights
    quantised = mlx_embeddings.generate(model, tokenizer, TEXTS).text_embeds
    assert not close(quantised, plain)

    folder = tmp_path / "saved"
    shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_weights(folder, weights)
    save_config(config, folder / "config.json")
    loaded, tokenizer = mlx_embeddings.load(str(folder))
    assert close(mlx_embeddings.generate(loaded, tokenizer, TEXTS).text_embeds, quantised)


# --- mlx-vlm ---------------------------------------------------------------------------------------------------------


@installed
@pytest.mark.usefixtures("packages")
def test_mlx_vlm_s_own_model_is_replaced_on_demand_only(
    tiny: Path, encoder: Encoder, pictures: list[Image.Image]
) -> None:
    from mlx_vlm.embedding_loader import load_embedding_model
    from mlx_vlm.utils import load_processor

    theirs = load_embedding_model(tiny)
    assert type(theirs).__module__.startswith("mlx_vlm.")
    with pytest.raises(EgemmaError, match=rf"^\[register\] mlx-vlm \S+ has its own {MODEL_TYPE}: override=True.*$"):
        register("mlx_vlm")
    assert type(load_embedding_model(tiny)) is type(theirs)

    register("mlx_vlm", override=True)
    register("mlx_vlm")  # is ours already
    model, processor = load_embedding_model(tiny), load_processor(tiny, add_detokenizer=False)
    assert type(model).__module__ == "egemma_mlx.dropin.mlx_vlm"
    assert type(processor).__module__.startswith("mlx_vlm.")
    inputs = processor.tokenizer(TEXTS, padding=True, return_tensors="np")
    output = model(mx.array(inputs["input_ids"]), attention_mask=mx.array(inputs["attention_mask"]))
    assert close(output.text_embeds, encoder.encode(TEXTS))

    # mlx-vlm 0.7.10's own processor does not run with transformers 5.24; its arrays have these names and shapes.
    images = Processor.from_pretrained(tiny)(images=pictures, return_tensors="mlx")
    assert close(model(**images).text_embeds, encoder.encode(pictures))


@installed
@pytest.mark.usefixtures("packages")
def test_a_text_model_in_mlx_vlm() -> None:
    import mlx_vlm

    register("mlx_vlm", override=True)
    model, processor = mlx_vlm.load(str(checkpoint.resolve("mini")))
    tokenizer = getattr(processor, "tokenizer", processor)
    inputs = tokenizer(TEXTS, padding=True, return_tensors="np")
    output = model(mx.array(inputs["input_ids"]), attention_mask=mx.array(inputs["attention_mask"]))
    assert close(output.text_embeds, Encoder("mini").encode(TEXTS))


@installed
@pytest.mark.usefixtures("packages")
def test_the_layout_of_mlx_vlm_s_own_model_is_known(tiny: Path) -> None:
    from mlx.utils import tree_flatten
    from mlx_vlm.embedding_loader import load_embedding_model

    official = mx.load(str(tiny / "model.safetensors"))
    theirs = dict(tree_flatten(load_embedding_model(tiny).parameters()))
    moved = [name for name in official if theirs[name].shape != official[name].shape]
    assert len(moved) == 4  # two convolutions, and one in each of the two layers
    shapes = checkpoint.tensor_shapes(Config.from_file(tiny / "config.json"), checkpoint.MODALITIES)
    found = layouts.official(theirs, shapes)
    assert found.keys() == official.keys()
    for name, array in official.items():
        assert bool(mx.array_equal(found[name], array)), name


# --- register --------------------------------------------------------------------------------------------------------


@installed
@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("imported", [False, True])
def test_a_module_of_the_package_s_own_is_not_replaced_silently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imported: bool
) -> None:
    models = importlib.import_module("mlx_embeddings.models")
    (tmp_path / f"{MODEL_TYPE}.py").write_text("Model = 'theirs'\n")
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(tmp_path)])
    importlib.invalidate_caches()
    name = f"mlx_embeddings.models.{MODEL_TYPE}"
    if imported:
        importlib.import_module(name)
    with pytest.raises(EgemmaError, match="has its own"):
        register()
    assert importlib.import_module(name).Model == "theirs"
    register(override=True)
    ours = importlib.import_module("egemma_mlx.dropin.mlx_embeddings")
    assert importlib.import_module(name) is ours
    assert getattr(models, MODEL_TYPE) is ours


def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    for package, distribution in zip(PACKAGES, ("mlx-embeddings", "mlx-vlm"), strict=True):
        monkeypatch.delitem(sys.modules, package, raising=False)
        with pytest.raises(
            EgemmaError, match=rf"^\[register\] {package} is not installed: pip install {distribution}$"
        ):
            register(package)


def test_an_unknown_package() -> None:
    with pytest.raises(EgemmaError, match="'mlx_embeddings' or 'mlx_vlm' but got 'mlx_lm'"):
        register("mlx_lm")


# --- the processor, without mlx-embeddings ---------------------------------------------------------------------------


def test_the_processor_s_other_names_are_the_tokenizer_s(tiny: Path, encoder: Encoder) -> None:
    processor = Processor.from_pretrained(str(tiny), trust_remote_code=True)
    ids = processor.encode(TEXTS[0], return_tensors="mlx")
    assert ids.shape[0] == 1
    assert processor.decode(ids[0], skip_special_tokens=True) == TEXTS[0]
    assert processor.mask_token_id == encoder.tokenizer.mask_token_id
    assert processor.prompts == encoder.prompts
    batch = processor.batch_encode_plus(TEXTS, return_tensors="mlx", padding=True, truncation=True, max_length=512)
    assert np.array_equal(batch["input_ids"], encoder.tokenizer(TEXTS, padding=True, return_tensors="np")["input_ids"])
    assert copy.copy(processor).tokenizer is processor.tokenizer
    with pytest.raises(AttributeError, match="nothing"):
        _ = processor.nothing


def test_a_length_beyond_the_model_s_is_the_model_s(tiny: Path) -> None:
    processor = Processor.from_pretrained(tiny)
    with pytest.warns(UserWarning, match="cut to 8192 tokens"):
        ids = processor(["word " * 9000], truncation=True, max_length=100_000)["input_ids"]
    assert len(ids[0]) == 8192


def test_the_processor_with_images(tiny: Path, pictures: list[Image.Image]) -> None:
    processor = Processor.from_pretrained(tiny)
    inputs = processor("<|image|> and <|image|>", pictures)
    assert {name: (array.shape, array.dtype) for name, array in inputs.items() if name != "input_ids"} == {
        "attention_mask": (inputs["input_ids"].shape, np.int32),
        "pixel_values": ((2, max(len(processor.image_processor(p).pixels) for p in pictures), 768), np.float32),
        "image_position_ids": ((*inputs["pixel_values"].shape[:2], 2), np.int32),
    }
    alone = processor(images=pictures[0], return_tensors="mlx")
    assert isinstance(alone["pixel_values"], mx.array)
    assert alone["pixel_values"].shape[0] == alone["input_ids"].shape[0] == 1
    with pytest.raises(EgemmaError, match="expected text or images"):
        processor()


def test_the_processor_of_a_text_model_refuses_images(tiny_text: Path, pictures: list[Image.Image]) -> None:
    with pytest.raises(EgemmaError, match="no vision tower"):
        Processor.from_pretrained(tiny_text)(images=pictures)
