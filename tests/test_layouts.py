"""Other tools' names and axis orders, against the shapes of the architecture."""

import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from egemma_mlx import layouts
from egemma_mlx.checkpoint import tensor_shapes
from egemma_mlx.config import Config
from egemma_mlx.errors import EgemmaError
from egemma_mlx.random_checkpoint import write_checkpoint

ALL = ("text", "image", "audio")
FIRST = "audio_tower.subsample_conv_projection.layer0.conv.weight"
SECOND = "audio_tower.subsample_conv_projection.layer1.conv.weight"
DEPTHWISE = "audio_tower.layers.0.lconv1d.depthwise_conv1d.weight"
# From MLX's order to PyTorch's and back.
ORDERS = {FIRST: (0, 2, 3, 1), SECOND: (0, 2, 3, 1), DEPTHWISE: (0, 2, 1)}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return Config.from_file(write_checkpoint(tmp_path_factory.mktemp("layouts") / "tiny", "tiny") / "config.json")


@pytest.fixture
def arrays(config: Config) -> dict[str, mx.array]:
    """A checkpoint whose every value differs from its neighbours'."""
    return {name: mx.random.normal(shape) for name, shape in tensor_shapes(config, ALL).items()}


def same(a: dict[str, mx.array], b: dict[str, mx.array]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("mlx_axes", [False, True], ids=["pytorch", "mlx"])
def test_both_names_and_both_orders(config: Config, arrays: dict[str, mx.array], prefix: str, mlx_axes: bool) -> None:
    stored = {}
    for name, array in arrays.items():
        order = next((order for end, order in ORDERS.items() if name.split(".")[-2:] == end.split(".")[-2:]), None)
        stored[prefix + name] = array.transpose(order) if mlx_axes and order else array
    moved = sum(stored[prefix + name].shape != array.shape for name, array in arrays.items())
    assert moved == (2 + config.audio.num_hidden_layers if mlx_axes else 0)
    assert same(layouts.official(stored, tensor_shapes(config, ALL)), arrays)


@pytest.mark.parametrize("name", ORDERS)
def test_shapes_alone_say_what_arrays_become(config: Config, name: str) -> None:
    expected = tensor_shapes(config, ALL)[name]
    mlx = tuple(expected[axis] for axis in ORDERS[name])
    assert mlx != expected
    assert layouts.official_shape(name, mlx, expected) == expected
    assert layouts.official_shape(name, expected, expected) == expected
    odd = (*expected[:-1], expected[-1] + 1)
    assert layouts.official_shape(name, odd, expected) == odd
    assert layouts.official_axes(name, mx.zeros(odd), expected).shape == odd
    assert layouts.official_shape(name, expected[1:], expected) == expected[1:]


def test_an_official_shape_that_would_fit_both_orders_stays() -> None:
    array = mx.random.normal((8, 3, 3, 3))
    assert np.array_equal(layouts.official_axes(SECOND, array, (8, 3, 3, 3)), array)


def test_only_convolutions_are_turned(config: Config) -> None:
    name = "vision_tower.patch_embedder.position_embedding_table"
    expected = tensor_shapes(config, ALL)[name]
    swapped = (expected[0], expected[2], expected[1])
    assert layouts.official_shape(name, swapped, expected) == swapped


def test_other_towers_are_left_out(config: Config, arrays: dict[str, mx.array]) -> None:
    expected = tensor_shapes(config)
    found = layouts.official(arrays, expected, tensor_shapes(config, ALL))
    assert same(found, {name: arrays[name] for name in expected})


def test_what_a_quantised_layer_has_goes_with_its_weight(config: Config, arrays: dict[str, mx.array]) -> None:
    text, audio = "language_model.layers.0.mlp.up_proj", "audio_tower.layers.0.self_attn.q_proj.linear"
    for layer in (text, audio):
        arrays |= {f"{layer}.scales": mx.zeros((2, 2)), f"{layer}.biases": mx.zeros((2, 2))}
    found = layouts.official(arrays, tensor_shapes(config), tensor_shapes(config, ALL))
    assert found.keys() == {*tensor_shapes(config), f"{text}.scales", f"{text}.biases"}


@pytest.mark.parametrize("name", ["lm_head.weight", "model.lm_head.scales", "model.model.language_model.norm.weight"])
def test_leftovers_are_refused(config: Config, arrays: dict[str, mx.array], name: str) -> None:
    with pytest.raises(EgemmaError, match=name):
        layouts.official({**arrays, name: mx.zeros((1,))}, tensor_shapes(config, ALL))


def test_a_tensor_under_both_names_is_refused(config: Config, arrays: dict[str, mx.array]) -> None:
    name = "language_model.norm.weight"
    with pytest.raises(EgemmaError, match=f"{name} comes twice"):
        layouts.official({**arrays, f"model.{name}": arrays[name]}, tensor_shapes(config, ALL))


def test_names_and_shapes_need_no_mlx() -> None:
    code = "import sys, egemma_mlx.layouts; sys.exit('mlx.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], check=False).returncode == 0
