"""`model(...)`: parity with transformers in float32, laziness, tracing, parameters, bad input."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from numpy.typing import NDArray
from test_packing import mixed_batches

from egemma_mlx import load
from egemma_mlx.checkpoint import load_tensors, tensor_shapes
from egemma_mlx.errors import EgemmaError
from egemma_mlx.models.encoder import EmbeddingGemma2, EmbeddingOutput
from egemma_mlx.packing import pack
from egemma_mlx.random_checkpoint import write_checkpoint

Ids = NDArray[np.int32]
Floats = NDArray[np.float64]

# Of unit vectors, on every component. Token states reach 4, and float32 itself is 1e-5 off float64 there.
UNIT, STATES = 2e-6, 5e-5
SLIDING, FULL = "sliding_attention", "full_attention"


def draw(length: int, seed: int = 0) -> Ids:
    """Ordinary token ids, above the special ones of either size and below those of media."""
    return np.random.default_rng([length, seed]).integers(300, 2000, length).astype(np.int32)


def grid(*lengths: int, side: str = "right") -> tuple[Ids, Ids]:
    """Texts of these lengths padded to the longest: ids and mask [B, L]."""
    width = max(lengths)
    column = np.arange(width)
    mask = np.stack([column < n if side == "right" else column >= width - n for n in lengths]).astype(np.int32)
    return np.stack([draw(width, row) for row in range(len(lengths))]) * mask, mask


class Pair:
    """One checkpoint in this package and, when first asked, in transformers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ours, self.tokenizer = load(folder)
        self._theirs: Any = None

    def expected(self, ids: Ids, mask: Ids | None = None) -> tuple[Floats, Floats]:
        """transformers' token states [B, L, D] and the unit vectors [B, D] of their masked mean, taken in float64."""
        import oracle
        import torch

        if self._theirs is None:
            self._theirs = oracle.transformers_model(self.folder)
        mask = np.ones_like(ids) if mask is None else mask
        with torch.no_grad():
            out = self._theirs(input_ids=torch.tensor(ids).long(), attention_mask=torch.tensor(mask).long())
        states = out.last_hidden_state.double().numpy() * mask[..., None]
        mean = states.sum(axis=1) / np.maximum(mask.sum(axis=1, keepdims=True), 1)
        return states, mean / np.maximum(np.linalg.norm(mean, axis=1, keepdims=True), 1e-12)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Pair]:
    """The tiny checkpoint with some keys of its text_config replaced."""
    made: dict[str, Pair] = {}

    def pair(**overrides: Any) -> Pair:
        key = repr(overrides)
        if key not in made:
            folder = tmp_path_factory.mktemp("pair") / "c"
            made[key] = Pair(write_checkpoint(folder, "tiny", modalities=("text",), **overrides))
        return made[key]

    return pair


@pytest.fixture(scope="module")
def tiny(pairs: Callable[..., Pair]) -> Pair:
    return pairs()


@pytest.fixture(scope="module")
def compiled(tiny: Pair) -> EmbeddingGemma2:
    return load(tiny.folder, compiled=True)[0]


@pytest.fixture(scope="module")
def full(full_text: Path) -> Pair:
    return Pair(full_text)


def apart(output: EmbeddingOutput, states: Floats, vectors: Floats) -> tuple[float, float]:
    """Largest difference of the token states, and of the unit vectors."""
    assert all(x.dtype == mx.float32 for x in output)
    assert output.last_hidden_state.shape == states.shape
    assert output.text_embeds.shape == output.pooler_output.shape == vectors.shape
    return (
        float(np.abs(np.array(output.last_hidden_state) - states).max()),
        float(np.abs(np.array(output.text_embeds) - vectors).max()),
    )


def check(pair: Pair, model: EmbeddingGemma2, ids: Ids, mask: Ids | None = None) -> None:
    output = model(mx.array(ids), None if mask is None else mx.array(mask))
    states, vectors = apart(output, *pair.expected(ids, mask))
    assert vectors <= UNIT
    assert states <= STATES
    if mask is not None:
        assert not np.array(output.last_hidden_state)[mask == 0].any()  # and not NaN
        assert not np.array(output.text_embeds)[~mask.any(axis=1)].any()


# --- parity ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 10, 17, 18, 257])
def test_equals_transformers_at_lengths_around_the_window_of_8(tiny: Pair, length: int) -> None:
    check(tiny, tiny.ours, draw(length)[None])


@pytest.mark.parametrize("length", [511, 512, 513, 514, 1025, 1026])
def test_equals_transformers_at_lengths_around_the_window_of_512(pairs: Callable[..., Pair], length: int) -> None:
    pair = pairs(sliding_window=512, layer_types=[SLIDING, SLIDING, FULL])
    check(pair, pair.ours, draw(length)[None])


def test_equals_transformers_on_a_batch_of_equal_lengths(tiny: Pair) -> None:
    check(tiny, tiny.ours, np.stack([draw(30, row) for row in range(4)]))


@pytest.mark.parametrize("side", ["left", "right"])
def test_equals_transformers_on_mixed_lengths_with_padding(tiny: Pair, side: str) -> None:
    check(tiny, tiny.ours, *grid(3, 40, 9, 9, 1, 17, 26, side=side))


def holes(*, empty_row: bool = False) -> tuple[Ids, Ids]:
    """Masks with holes, some wider than the window, and a row of none."""
    ids = np.stack([draw(48, row) for row in range(6)])
    mask = (np.random.default_rng(1).random(ids.shape) < np.array([[0.9], [0.5], [0.2], [0.5], [0.6], [1]])).astype(
        np.int32
    )
    mask[3, 5:40] = 0
    mask[4] = np.arange(48) % 9 == 0
    if empty_row:
        mask[1] = 0
    return ids, mask


def test_equals_transformers_under_masks_with_holes(tiny: Pair) -> None:
    check(tiny, tiny.ours, *holes())


def test_a_row_that_is_all_padding_gives_zeros_and_disturbs_no_other(tiny: Pair) -> None:
    ids, mask = holes(empty_row=True)
    check(tiny, tiny.ours, ids, mask)
    output = tiny.ours(mx.array(ids[1:2]), mx.array(mask[1:2]))  # and alone: a batch without a token
    assert all(not np.array(x).any() for x in output)


@pytest.mark.parametrize(
    "overrides",
    [
        {"layer_types": [FULL] * 3},
        {"layer_types": [SLIDING, FULL] * 2},
        {"layer_types": [SLIDING, FULL, SLIDING]},
        {"layer_types": [SLIDING] * 2},
        {"sliding_window": 1},
        {"sliding_window": 3},
        {"sliding_window": 64},
        {"num_attention_heads": 4, "num_key_value_heads": 1},
        {"num_attention_heads": 2, "num_key_value_heads": 2},
        {"head_dim": 8, "per_layer_config": {}},
        {"per_layer_config": {"02": {"head_dim": 24, "num_key_value_heads": 2}, "5": {"head_dim": 24}}},
        {
            "rms_norm_eps": 1e-2,
            "rope_parameters": {kind: {"rope_theta": 50.0, "rope_type": "default"} for kind in (SLIDING, FULL)},
        },
    ],
    ids=[
        "all full",
        "alternating",
        "last declared sliding",
        "all declared sliding",
        "window 1",
        "window 3",
        "window 64",
        "4 heads on 1",
        "2 heads on 2",
        "no per-layer sizes",
        "other per-layer sizes",
        "other eps and theta",
    ],
)
def test_equals_transformers_on_other_architectures(pairs: Callable[..., Pair], overrides: dict[str, Any]) -> None:
    pair = pairs(**overrides)
    check(pair, pair.ours, *grid(1, 70, 10, 33))


def test_a_layer_declared_sliding_is_full_when_it_is_the_last(pairs: Callable[..., Pair]) -> None:
    layers = pairs(layer_types=[SLIDING, FULL, SLIDING]).ours.config.text.layers
    assert [layer.window for layer in layers] == [8, None, None]


def test_float32_weights_give_their_own_vectors(tmp_path: Path) -> None:
    pair = Pair(write_checkpoint(tmp_path / "c", modalities=("text",), dtype="float32", layer_types=[SLIDING, FULL]))
    check(pair, pair.ours, *grid(20, 5))


# One length for each size of bucket: every new size calls a C++ compiler on the CPU.
@pytest.mark.parametrize("case", ["one token", "around the window", "left", "holes"])
def test_the_compiled_forward_equals_transformers(tiny: Pair, compiled: EmbeddingGemma2, case: str) -> None:
    if case == "one token":
        check(tiny, compiled, draw(1)[None])
    elif case == "around the window":
        for length in (7, 8, 9, 10, 17, 18):
            check(tiny, compiled, draw(length)[None])
    elif case == "left":
        check(tiny, compiled, *grid(3, 40, 9, 9, 1, 17, 26, side="left"))
    else:
        check(tiny, compiled, *holes(empty_row=True))


def test_placeholder_ids_without_media_are_padding_rows_as_in_transformers(tiny: Pair) -> None:
    ids = draw(12)[None]
    ids[0, [2, 5, 9]] = tiny.ours.config.placeholder_ids
    check(tiny, tiny.ours, ids)


def test_a_batch_equals_its_rows_alone(tiny: Pair) -> None:
    for ids, mask in (grid(3, 40, 9, 9, 1, 17, 26), grid(30, 7, 12, side="left"), holes()):
        together = np.array(tiny.ours(mx.array(ids), mx.array(mask)).text_embeds)
        for row, vector in enumerate(together):
            alone = tiny.ours(mx.array(ids[row : row + 1]), mx.array(mask[row : row + 1])).text_embeds
            assert np.abs(np.array(alone)[0] - vector).max() <= UNIT


def test_padding_changes_nothing_but_a_hole_does(tiny: Pair) -> None:
    ids = draw(20)[None]
    plain = np.array(tiny.ours(mx.array(ids)).text_embeds)
    for pad in ((0, 9), (9, 0), (4, 5)):
        wide = np.pad(ids, ((0, 0), pad), constant_values=77)
        mask = np.pad(np.ones_like(ids), ((0, 0), pad))
        assert np.abs(np.array(tiny.ours(mx.array(wide), mx.array(mask)).text_embeds) - plain).max() <= UNIT
    wide, mask = np.insert(ids, 10, 77, axis=1), np.insert(np.ones_like(ids), 10, 0, axis=1)
    assert np.abs(np.array(tiny.ours(mx.array(wide), mx.array(mask)).text_embeds) - plain).max() > 1e-3


@pytest.mark.parametrize("dtype", [mx.bool_, mx.int32, mx.int64, mx.uint8, mx.float32, mx.float16, mx.bfloat16])
def test_masks_of_any_real_dtype_mean_the_same(tiny: Pair, dtype: mx.Dtype) -> None:
    ids, mask = holes()
    expected = tiny.ours(mx.array(ids), mx.array(mask))
    output = tiny.ours(mx.array(ids), mx.array(mask).astype(dtype))
    for got, want in zip(output, expected, strict=True):
        assert np.abs(np.array(got) - np.array(want)).max() <= STATES


def test_pooler_output_is_the_mean_of_token_states_and_text_embeds_its_unit_vector(tiny: Pair) -> None:
    ids, mask = holes()
    states, vectors, pooled = (np.array(x).astype(np.float64) for x in tiny.ours(mx.array(ids), mx.array(mask)))
    assert np.abs(states.sum(axis=1) / mask.sum(axis=1, keepdims=True) - pooled).max() < 1e-6
    assert np.abs(pooled / np.linalg.norm(pooled, axis=1, keepdims=True) - vectors).max() < 1e-7
    assert (np.abs(np.linalg.norm(pooled, axis=1) - 1) > 0.05).all()


@pytest.mark.parametrize("kind", ["lists", "numpy", "mlx int64", "mlx uint16"])
def test_ids_of_any_integer_kind_mean_the_same(tiny: Pair, kind: str) -> None:
    ids = draw(12)[None]
    given = {
        "lists": ids.tolist(),
        "numpy": ids.astype(np.int64),
        "mlx int64": mx.array(ids).astype(mx.int64),
        "mlx uint16": mx.array(ids).astype(mx.uint16),
    }[kind]
    assert mx.array_equal(tiny.ours(given).text_embeds, tiny.ours(mx.array(ids)).text_embeds)


# --- a packed row ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", [True, False], ids=["host table", "device table"])
def test_segments_of_a_packed_row_equal_texts_alone(tiny: Pair, host: bool) -> None:
    texts = [draw(n, n) for n in (3, 40, 1, 17)]
    row = np.concatenate([*texts, draw(5)])  # and five rows of no segment
    table = np.array([[0, 3], [3, 40], [43, 1], [44, 17], [61, 0]], np.int32)
    output = tiny.ours(mx.array(row), segments=table if host else mx.array(table))
    assert output.last_hidden_state.shape == (66, 96) and output.text_embeds.shape == (5, 96)
    assert not np.array(output.last_hidden_state)[61:].any()
    assert not np.array(output.text_embeds)[4].any()
    for (start, length), text, vector in zip(table, texts, output.text_embeds, strict=False):
        alone = tiny.ours(mx.array(text[None]))
        assert np.abs(np.array(alone.text_embeds)[0] - np.array(vector)).max() <= UNIT
        states = np.array(output.last_hidden_state)[start : start + length]
        assert np.abs(np.array(alone.last_hidden_state)[0] - states).max() <= STATES


@pytest.mark.parametrize("host", [True, False], ids=["host table", "device table"])
def test_positions_of_a_packed_row_mean_the_columns_of_a_mask(tiny: Pair, host: bool) -> None:
    ids, mask = holes()
    expected = np.array(tiny.ours(mx.array(ids), mx.array(mask)).text_embeds)
    lengths = mask.sum(axis=1)
    table = np.stack([np.cumsum(lengths) - lengths, lengths], axis=1).astype(np.int32)
    output = tiny.ours(
        mx.array(ids[mask != 0]),
        segments=table if host else mx.array(table),
        positions=mx.array(np.nonzero(mask)[1]),
    )
    assert np.abs(np.array(output.text_embeds) - expected).max() <= UNIT


def test_positions_given_cost_no_table_of_every_position_there_could_be(tiny: Pair) -> None:
    model = load(tiny.folder)[0]
    before = mx.get_active_memory()
    mx.eval(model(mx.array(draw(12)), segments=np.array([[0, 12]]), positions=mx.arange(12)))
    assert mx.get_active_memory() - before < 20e6  # 262,144 positions are 100 MB here, 1.6 GB at full size


# --- laziness and tracing --------------------------------------------------------------------------------------------


def through_a_file(path: Path, function: Callable[..., Any], *arrays: mx.array, **keywords: mx.array) -> list[Any]:
    """What `function` returns once exported to a file and imported again."""
    mx.export_function(str(path / "f.mlxfn"), function, *arrays, **keywords)
    return list(mx.import_function(str(path / "f.mlxfn"))(*arrays, **keywords))


def traces(function: Callable[..., Any], *arrays: mx.array, **keywords: mx.array) -> bool:
    nodes: list[dict[str, Any]] = []
    mx.export_function(nodes.append, function, *arrays, **keywords)
    return any(node["type"] == "primitive" for node in nodes)


@pytest.mark.parametrize("whole", [False, True], ids=["eager", "compiled"])
def test_export_function_traces_the_model_itself(tiny: Pair, compiled: EmbeddingGemma2, whole: bool) -> None:
    model = compiled if whole else tiny.ours
    assert traces(model, mx.array(draw(12)[None]))
    ids, mask = (mx.array(x) for x in holes())
    assert traces(model, ids, mask)
    assert traces(model, mx.array(draw(12)), segments=mx.array([[0, 5], [5, 7]]))
    table = np.array([[0, 5], [5, 7]])
    assert traces(lambda ids: model(ids, segments=table), mx.array(draw(12)))
    assert traces(lambda ids, at: model(ids, segments=table, positions=at), mx.array(draw(12)), mx.arange(12))


def test_a_new_model_may_be_traced_before_it_ever_ran(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", modalities=("text",), hidden_size=72, layer_types=[SLIDING, FULL])
    ids = mx.array(draw(12)[None])
    first = through_a_file(tmp_path, load(folder)[0], ids)
    model = load(folder)[0]
    assert traces(model, ids)
    assert np.abs(np.array(model(ids).text_embeds) - np.array(first[1])).max() <= UNIT


def test_traced_without_a_mask_the_vectors_are_the_same(tiny: Pair, tmp_path: Path) -> None:
    ids = mx.array(np.stack([draw(30, 0), draw(30, 1)]))
    states, vectors, pooled = through_a_file(tmp_path, tiny.ours, ids)
    expected = tiny.ours(ids)
    assert mx.abs(vectors - expected.text_embeds).max().item() <= UNIT
    assert mx.abs(pooled - expected.pooler_output).max().item() <= UNIT
    assert mx.abs(states - expected.last_hidden_state).max().item() <= STATES


def test_traced_with_a_mask_the_vectors_are_the_same_for_any_mask(tiny: Pair, tmp_path: Path) -> None:
    ids, mask = holes()
    mx.export_function(str(tmp_path / "f.mlxfn"), tiny.ours, mx.array(ids), mx.array(np.ones_like(mask)))
    imported = mx.import_function(str(tmp_path / "f.mlxfn"))
    for other in (mask, holes(empty_row=True)[1], np.ones_like(mask), np.zeros_like(mask)):
        states, vectors, _ = imported(mx.array(ids), mx.array(other))
        expected = tiny.ours(mx.array(ids), mx.array(other))
        assert mx.abs(vectors - expected.text_embeds).max().item() <= UNIT
        assert mx.abs(states - expected.last_hidden_state).max().item() <= STATES
        assert not np.array(states)[other == 0].any()


def test_traced_with_segments_the_vectors_are_the_same_for_any_table(tiny: Pair, tmp_path: Path) -> None:
    row = mx.array(draw(60))
    mx.export_function(str(tmp_path / "f.mlxfn"), tiny.ours, row, segments=mx.array([[0, 60], [60, 0]]))
    imported = mx.import_function(str(tmp_path / "f.mlxfn"))
    for table in ([[0, 60], [60, 0]], [[0, 7], [7, 53]], [[3, 20], [30, 1]]):
        vectors = imported(row, segments=mx.array(table))[1]
        assert mx.abs(vectors - tiny.ours(row, segments=np.array(table)).text_embeds).max().item() <= UNIT


def test_with_a_host_mask_ids_are_not_read(tiny: Pair) -> None:
    ids, mask = holes()
    assert traces(lambda ids: model_output(tiny.ours, ids, mask), mx.array(ids))


def model_output(model: EmbeddingGemma2, ids: mx.array, mask: Ids) -> tuple[mx.array, ...]:
    return tuple(model(ids, mx.array(mask)))


@pytest.mark.parametrize("shape", [(0, 5), (0, 0), (3, 0)])
@pytest.mark.parametrize("masked", [False, True])
def test_zero_rows_give_zero_rows_and_no_columns_give_zeros(tiny: Pair, shape: tuple[int, int], masked: bool) -> None:
    ids = mx.zeros(shape, mx.int32)
    for validate in (False, True):
        output = tiny.ours(ids, mx.ones(shape) if masked else None, validate=validate)
        assert output.last_hidden_state.shape == (*shape, 96)
        assert output.text_embeds.shape == output.pooler_output.shape == (shape[0], 96)
        assert all(not np.array(x).any() for x in output)


# --- buckets ---------------------------------------------------------------------------------------------------------


class Counting(EmbeddingGemma2):
    """Counts how often Python runs under the model's `mx.compile`."""

    traces = 0

    def _traced(self, *arguments: Any) -> Any:
        self.traces += 1
        return super()._traced(*arguments)


@pytest.mark.parametrize(
    ("corpus", "seed"), [("mixed", 0), ("mixed", 2), ("mixed", 5), ("mixed", 7), ("short", 3), ("growing", 7)]
)
def test_two_hundred_random_batches_are_few_traces_and_little_padding(tiny: Pair, corpus: str, seed: int) -> None:
    batches = mixed_batches(seed, 200)
    if corpus == "short":  # titles and queries
        random = np.random.default_rng(seed)
        batches = [random.integers(3, 16, random.integers(1, 400)).tolist() for _ in range(200)]
    elif corpus == "growing":  # positions reach further and further, up to the limit
        batches = [*sorted(batches, key=max), [8192]]
    model = Counting(tiny.ours.config, compiled=True)
    taken = 0
    for lengths in batches:
        # Lazy: a trace is made when the model is called, and nothing is computed.
        states, pooled, unit = model._run(pack([np.zeros(n, np.int32) for n in lengths]))
        assert pooled.shape == unit.shape == (len(lengths), 96)
        taken += states.shape[0]
    rows = sum(map(sum, batches))
    assert 1 < model.traces <= 30
    assert taken - rows <= 0.15 * taken


def test_what_is_in_a_bucket_makes_no_new_trace(tiny: Pair) -> None:
    model = Counting(tiny.ours.config, compiled=True)
    for lengths in ([129], [200, 3], [65, 65, 65], [240, *[1] * 9]):
        model.pooled(pack([draw(n) for n in lengths]))
    assert model.traces == 1
    model.pooled(pack([draw(n) for n in (400, 3)]))
    assert model.traces == 2


# --- parameters ------------------------------------------------------------------------------------------------------


def test_parameters_have_the_checkpoints_names_and_shapes(tiny: Pair) -> None:
    tree = {name: tuple(value.shape) for name, value in tree_flatten(tiny.ours.parameters())}
    assert tree == tensor_shapes(tiny.ours.config)


def test_parameters_hold_the_checkpoints_values(tiny: Pair) -> None:
    stored = load_tensors(tiny.folder, tiny.ours.config)
    for name, value in tree_flatten(tiny.ours.parameters()):
        assert mx.array_equal(value.astype(mx.float32), stored[name].astype(mx.float32)), name
    assert tiny.ours.language_model.embed_tokens.weight.dtype == mx.bfloat16  # widened row by row


@pytest.mark.parametrize("whole", [False, True], ids=["eager", "compiled"])
def test_load_weights_after_a_first_call_changes_the_vectors(tiny: Pair, tmp_path: Path, whole: bool) -> None:
    model = load(tiny.folder, compiled=whole)[0]
    other = Pair(write_checkpoint(tmp_path / "other", modalities=("text",), seed=1))
    ids = mx.array(draw(10)[None])
    before = np.array(model(ids).text_embeds)
    model.load_weights(list(load_tensors(other.folder, other.ours.config).items()))
    after = np.array(model(ids).text_embeds)
    assert np.abs(after - before).max() > 0.01
    assert np.abs(after - np.array(other.ours(ids).text_embeds)).max() <= UNIT


@pytest.mark.parametrize("group_size", [32, 64])
def test_a_quantised_model_stays_close(tmp_path: Path, group_size: int) -> None:
    # All widths multiples of 64.
    folder = write_checkpoint(
        tmp_path / "c", modalities=("text",), hidden_size_per_layer_input=64, layer_types=[SLIDING, FULL]
    )
    model = load(folder)[0]
    ids, mask = (mx.array(x) for x in grid(3, 40, 9, 17))
    exact = model(ids, mask)
    nn.quantize(model, group_size, 8, class_predicate=lambda _, module: isinstance(module, nn.Linear))
    assert isinstance(model.language_model.ple.per_layer_model_projection, nn.QuantizedLinear)
    assert isinstance(model.language_model.layers[0].self_attn.k_proj, nn.QuantizedLinear)
    quantised = model(ids, mask)
    cosines = (exact.text_embeds * quantised.text_embeds).sum(axis=1)
    assert 0.99 <= cosines.min().item() < 1 - 1e-7  # close, and another model
    assert quantised.last_hidden_state.shape == (4, 40, 96)


# --- bad input -------------------------------------------------------------------------------------------------------

IDS, ROW = [[5, 6, 7], [8, 9, 10]], [5, 6, 7, 8]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": mx.array([5, 6, 7])}, r"input_ids of shape \[B, L\] but got \(3,\)"),
        ({"input_ids": mx.zeros((1, 2, 3), mx.int32)}, r"input_ids of shape \[B, L\] but got \(1, 2, 3\)"),
        ({"input_ids": mx.array([[5.0, 6.0]])}, "input_ids of an integer dtype but got .*float32"),
        ({"input_ids": mx.array([[True]])}, "input_ids of an integer dtype but got .*bool"),
        ({"input_ids": [[5.5, 6]]}, "input_ids of an integer dtype but got .*float"),
        ({"input_ids": [[5, 6], [7]]}, "input_ids"),
        ({"input_ids": None}, "input_ids"),
        ({"input_ids": "a text"}, "input_ids"),
        ({"input_ids": IDS, "attention_mask": mx.ones((2, 4))}, r"attention_mask of shape \(2, 3\) but got \(2, 4\)"),
        ({"input_ids": IDS, "attention_mask": [1, 1, 1]}, r"attention_mask of shape \(2, 3\) but got \(3,\)"),
        ({"input_ids": IDS, "attention_mask": mx.ones((2, 3), mx.complex64)}, "attention_mask .*complex64"),
        ({"input_ids": IDS, "attention_mask": [["1", "1", "0"]] * 2}, "attention_mask"),
        ({"input_ids": IDS, "positions": mx.zeros((2, 3), mx.int32)}, "segments beside positions"),
        ({"input_ids": ROW, "segments": [[0, 4]], "attention_mask": mx.ones((4,))}, "segments or attention_mask"),
        ({"input_ids": IDS, "segments": [[0, 3]]}, r"input_ids of shape \[T\] beside segments but got \(2, 3\)"),
        ({"input_ids": mx.zeros((0,), mx.int32), "segments": [[0, 0]]}, r"input_ids of shape \[T\].* got \(0,\)"),
        ({"input_ids": ROW, "segments": [0, 4]}, r"segments of shape \[S, 2\] but got \(2,\)"),
        ({"input_ids": ROW, "segments": mx.zeros((1, 3), mx.int32)}, r"segments of shape \[S, 2\] but got \(1, 3\)"),
        ({"input_ids": ROW, "segments": [[0.0, 4.0]]}, "segments of an integer dtype"),
        ({"input_ids": ROW, "segments": mx.array([[0.0, 4.0]])}, "segments of an integer dtype"),
        ({"input_ids": ROW, "segments": [[0, 5]]}, "segments"),
        ({"input_ids": ROW, "segments": [[0, -1]]}, "segments"),
        ({"input_ids": ROW, "segments": [[0, 4]], "positions": [0, 1]}, r"positions of shape \(4,\) but got \(2,\)"),
        ({"input_ids": ROW, "segments": [[0, 4]], "positions": [0.0, 1, 2, 3]}, "positions of an integer dtype"),
        ({"input_ids": [[5, 2048]], "validate": True}, r"input_ids in 0…2047 but got 5…2048"),
        ({"input_ids": [[-1, 5]], "validate": True}, r"input_ids in 0…2047 but got -1…5"),
        ({"input_ids": [5, -1], "segments": [[0, 2]], "validate": True}, r"input_ids in 0…2047"),
        ({"input_ids": IDS, "attention_mask": [[1, np.nan, 1]] * 2, "validate": True}, "attention_mask .*NaN"),
    ],
)
def test_bad_input_is_one_error_that_names_the_argument(tiny: Pair, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(EgemmaError, match=message):
        tiny.ours(**arguments)


def test_valid_input_passes_validation(tiny: Pair) -> None:
    ids, mask = (mx.array(x) for x in grid(3, 40))
    for arguments in ((ids,), (ids, mask)):
        assert mx.array_equal(tiny.ours(*arguments, validate=True).text_embeds, tiny.ours(*arguments).text_embeds)


# --- full size -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 31, 511, 512, 513, 514, 1025, 1026])
def test_full_size_equals_transformers(full: Pair, length: int) -> None:
    check(full, full.ours, draw(length)[None] * 100)


@pytest.mark.slow
def test_full_size_equals_transformers_on_a_mixed_batch(full: Pair) -> None:
    ids, mask = grid(3, 610, 31, 31, 1, 120)
    check(full, full.ours, ids * 100, mask)


@pytest.mark.slow
def test_full_size_compiled_equals_transformers(full: Pair) -> None:
    model = load(full.folder, compiled=True)[0]
    ids, mask = grid(3, 31, 12)
    check(full, model, ids * 100, mask)
