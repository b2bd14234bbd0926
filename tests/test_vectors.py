"""Shortening, normalising, quantising and comparing, against sentence-transformers and float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from egemma_mlx import vectors
from egemma_mlx.errors import EgemmaError
from egemma_mlx.vectors import PRECISIONS

RNG = np.random.default_rng(0)


def unit(count: int, width: int) -> np.ndarray:
    return vectors.normalize(RNG.standard_normal((count, width)).astype(np.float32))


def reference() -> Any:
    return pytest.importorskip("sentence_transformers.util.quantization").quantize_embeddings


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", [(2, 768), (50, 96), (3, 13), (7, 8), (0, 16), (0, 13)])
def test_quantize_is_sentence_transformers(precision: vectors.Precision, shape: tuple[int, int]) -> None:
    given = unit(*shape)
    given[:, :2] = 0.0  # a dimension without range, whose sign is neither
    expected = reference()(given, precision)
    found = vectors.quantize(given, precision)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("precision", ["int8", "uint8"])
def test_quantize_with_ranges_is_sentence_transformers(precision: vectors.Precision) -> None:
    """Ranges of a sample, which the vectors leave on both sides; one vector is enough then."""
    sample = unit(20, 32)
    ranges = np.stack([sample.min(axis=0), sample.max(axis=0)])
    for given in (unit(50, 32), unit(1, 32), unit(0, 32)):
        expected = reference()(given, precision, ranges=ranges)
        np.testing.assert_array_equal(vectors.quantize(given, precision, ranges), expected)
        np.testing.assert_array_equal(expected, reference()(given, precision, calibration_embeddings=sample))


def test_quantize_refuses() -> None:
    with pytest.raises(EgemmaError, match=r"precision to be one of float32, int8, .* but got 'float16'"):
        vectors.quantize(unit(2, 8), "float16")  # type: ignore[arg-type]
    with pytest.raises(EgemmaError, match="'int8' takes its ranges from the vectors: expected two or more"):
        vectors.quantize(unit(1, 8), "int8")
    with pytest.raises(EgemmaError, match=r"ranges of shape \(2, 8\) but got \(2, 7\)"):
        vectors.quantize(unit(2, 8), "uint8", np.zeros((2, 7), np.float32))


def test_truncate_and_normalize() -> None:
    given = unit(5, 96)
    assert vectors.truncate(given, None) is given
    cut = vectors.truncate(given, np.int64(16))  # type: ignore[arg-type]
    np.testing.assert_array_equal(cut, given[:, :16])
    exact = given[:, :16].astype(np.float64)
    exact /= np.linalg.norm(exact, axis=1, keepdims=True)
    found = vectors.normalize(cut)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, exact, atol=1e-7)
    np.testing.assert_array_equal(vectors.truncate(given[0], 3), given[0, :3])


@pytest.mark.parametrize("dim", [0, -1, 97, 1.5, True, "16"])
def test_truncate_refuses(dim: Any) -> None:
    with pytest.raises(EgemmaError, match=r"truncate_dim in 1…96 but got"):
        vectors.truncate(unit(1, 96), dim)


def test_normalize_keeps_zero_vectors() -> None:
    given = np.array([[0.0, 0.0], [3.0, 4.0]], np.float32)
    np.testing.assert_allclose(vectors.normalize(given), [[0.0, 0.0], [0.6, 0.8]], atol=1e-7)


def test_similarity() -> None:
    a, b = 3 * unit(4, 96), unit(7, 96)
    exact = (a / np.linalg.norm(a, axis=1, keepdims=True)).astype(np.float64) @ b.T.astype(np.float64)
    found = vectors.similarity(a, b)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, exact, atol=5e-7)
    np.testing.assert_allclose(vectors.similarity(a[0], b.tolist()), exact[:1], atol=5e-7)
    np.testing.assert_array_equal(vectors.similarity(np.zeros(96), b), np.zeros((1, 7)))
    with pytest.raises(EgemmaError, match="one width but got 96 and 95"):
        vectors.similarity(a, b[:, :95])
