"""`egemma-mlx bench`: workloads, contenders, the times of kernel functions, the report."""

from __future__ import annotations

import importlib.util
import json
import signal
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

import egemma_mlx
from egemma_mlx import cli
from egemma_mlx.bench import __main__ as bench
from egemma_mlx.bench import device, functions
from egemma_mlx.bench.contenders import Contender, first_forward, mlx_vlm, ours, text_model
from egemma_mlx.bench.functions import function_times, pairs
from egemma_mlx.bench.workloads import STANDARD, mixed_lengths, workload
from egemma_mlx.errors import EgemmaError
from egemma_mlx.kernels.approx import on_cpu

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """The command line, in short rounds and without a peer that happens to be installed."""

    def call(*arguments: object) -> tuple[int, str, str]:
        code = cli.main([str(argument) for argument in arguments])
        return (code, *capsys.readouterr())

    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(functions, "_ROUND_SECONDS", 1e-3)
    handler = signal.getsignal(signal.SIGTERM)
    yield call
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture(scope="module")
def plain(tiny_text: Path) -> Contender:
    return ours(tiny_text, "ops", "float32")


# --- workloads -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "lengths"), [("1x16", (16,)), ("3×7", (7, 7, 7)), ("32x512", (512,) * 32), ("mixed:5", mixed_lengths(5))]
)
def test_a_workload_is_its_lengths(name: str, lengths: tuple[int, ...]) -> None:
    found = workload(name)
    assert (found.lengths, found.tokens) == (lengths, sum(lengths))
    texts = found.texts(300)
    assert [len(ids) for ids in texts] == list(lengths)
    assert all(ids.dtype == np.int32 and ids.min() >= 10 and ids.max() < 300 for ids in texts)
    assert all(np.array_equal(*each) for each in zip(texts, found.texts(300), strict=True))


def test_the_mixed_corpus_has_1000_texts_of_3_to_512_tokens() -> None:
    lengths = workload("mixed").lengths
    assert (len(lengths), min(lengths), max(lengths)) == (1000, 3, 512)
    assert lengths == workload("mixed").lengths != tuple(sorted(lengths))
    assert (min(mixed_lengths(40)), max(mixed_lengths(40))) == (3, 512)
    assert workload("mixed").is_mixed and not workload("32x512").is_mixed
    assert [workload(name).name for name in STANDARD[-2:]] == ["1×8192", "mixed, 1,000 texts"]


@pytest.mark.parametrize("name", ["", "16", "0x16", "2x", "mixed:0", "mixed:x", "1x16 "])
def test_another_name_is_refused(name: str) -> None:
    with pytest.raises(EgemmaError, match="expected a workload like 32x512, mixed or mixed:40 but got"):
        workload(name)


def test_first_forward_is_the_longest_texts_that_fit(plain: Contender) -> None:
    lengths = [len(ids) for ids in first_forward(workload("mixed:40").texts(300))]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] == max(mixed_lengths(40))
    assert len(first_forward(workload("1x16").texts(300))) == 1


# --- contenders ------------------------------------------------------------------------------------------------------


def test_ours_embeds_in_the_order_of_the_texts(plain: Contender) -> None:
    texts = workload("mixed:20").texts(300)
    vectors = plain.embed(texts)
    assert vectors.shape == (20, 96) and np.abs(np.linalg.norm(vectors, axis=1) - 1).max() < 1e-6
    for ids, vector in list(zip(texts, vectors, strict=True))[:4]:
        assert np.abs(plain.embed([ids])[0] - vector).max() <= 2e-6


def test_launches_are_those_of_the_graph(plain: Contender) -> None:
    found = plain.launches(workload("1x16").texts(300))
    names: list[str] = []
    model, ids = text_model(plain), mx.arange(10, 26)[None]
    mx.export_function(lambda event: names.append(event.get("name", "")), lambda x: model(x).pooler_output, ids)
    assert found.custom == 0
    assert 24 < names.count("Matmul") < found.other and found.views > names.count("Transpose") > 0


PEER = """
import mlx.core as mx
from mlx import nn
from egemma_mlx.loading import load
from types import SimpleNamespace

def load_model(folder):
    {fault}
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = load(folder)[0]
        def __call__(self, ids, attention_mask):
            return SimpleNamespace(text_embeds=self.inner(ids, attention_mask).text_embeds)
    return Model()
"""


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Installs a package that stands in for mlx-vlm."""

    def install(fault: str = "pass") -> None:
        (tmp_path / "mlx_vlm").mkdir()
        (tmp_path / "mlx_vlm" / "__init__.py").touch()
        (tmp_path / "mlx_vlm" / "utils.py").write_text(PEER.format(fault=fault))
        facts = tmp_path / "mlx_vlm-9.8.7.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: mlx-vlm\nVersion: 9.8.7\n")
        for name in ("mlx_vlm", "mlx_vlm.utils"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.syspath_prepend(tmp_path)

    yield install
    for name in ("mlx_vlm", "mlx_vlm.utils"):
        sys.modules.pop(name, None)


def test_mlx_vlm_embeds_the_same_texts(plain: Contender, tiny_text: Path, peer: Callable[..., None]) -> None:
    peer()
    found = mlx_vlm(tiny_text)
    assert isinstance(found, Contender) and found.name == f"mlx-vlm 9.8.7 {'float32' if on_cpu() else 'bfloat16'}"
    texts = workload("mixed:12").texts(300)
    assert np.abs(found.embed(texts) - plain.embed(texts)).max() <= 2e-6
    assert found.launches(texts).other > 100 and found.weight_bytes > 1e6


def test_a_peer_that_fails_is_one_line(tiny_text: Path, peer: Callable[..., None]) -> None:
    peer("raise KeyError('embedding_gemma2')")
    assert mlx_vlm(tiny_text) == "mlx-vlm 9.8.7 does not load this checkpoint (KeyError: 'embedding_gemma2')"


# --- kernel functions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lengths", "window"), [*product([(1,), (5,), (4, 9, 1)], [None, 0, 1, 3, 8, 9, 50])])
def test_pairs_are_those_within_the_window(lengths: tuple[int, ...], window: int | None) -> None:
    reach = max(lengths) if window is None else window
    assert pairs(lengths, window) == sum(abs(i - j) <= reach for n in lengths for i in range(n) for j in range(n))


def test_every_product_of_a_forward_is_counted(plain: Contender) -> None:
    model = text_model(plain)
    times = function_times(model, workload("2x24").texts(300))
    config = model.config.text
    counted = {each.function: 0.0 for each in times}
    for each in times:
        counted[each.function] += 0 if each.tflops is None else each.tflops * 1e12 * each.ms / 1e3 * each.calls
    text = model.language_model
    layers = sum(
        array.size
        for layer in text.layers
        for part in (layer.self_attn, layer.mlp, layer.ple_block)
        for _, array in tree_flatten(part.parameters())
        if array.ndim == 2
    )
    products = 2 * 48 * (layers + text.ple.per_layer_model_projection.weight.size)
    products += 2 * 2 * text.embedding_projection.weight.size
    assert sum(counted.values()) - counted["attention"] == pytest.approx(products)
    attended = sum(4 * each.heads * each.head_dim * pairs((24, 24), each.window) for each in config.layers)
    assert counted["attention"] == pytest.approx(attended)
    assert sum(each.calls for each in times if each.function == "attention") == len(config.layers)
    assert sum(each.share for each in times) == pytest.approx(1)
    assert all(each.ms > 0 and each.gbps > 0 and each.shapes for each in times if each.function != "plan")


def test_bytes_are_those_of_the_arrays(plain: Contender) -> None:
    times = function_times(text_model(plain), workload("1x16").texts(300))
    (last,) = (each for each in times if each.shapes == "1×64 96×64")
    assert last.gbps * 1e9 * last.ms / 1e3 == pytest.approx(4 * (64 + 96 * 64 + 2 * 96))  # unit vectors too


# --- the command -----------------------------------------------------------------------------------------------------


def test_json_is_complete(run: Run, tiny_text: Path) -> None:
    options = ("--workloads", "1x16", "2x40", "mixed:6", "--rounds", 2, "--compute-precision", "float32", "bfloat16")
    code, out, err = run("bench", "--model", tiny_text, "--json", "--backend", "ops", *options)
    assert code == 0
    report = json.loads(out)
    assert report["machine"]["mlx"] and report["model"] == str(tiny_text)
    assert all(report["ceilings"][name] > 0 for name in ("side", "float32_tflops", "gbps", "launch_us"))
    assert (report["ceilings"]["bfloat16_tflops"] is None) == on_cpu()
    rows = {(row["workload"], row["contender"]): row for row in report["timings"]}
    names = ("1×16", "2×40", "mixed, 6 texts")
    assert list(rows) == list(product(names, ("ops float32", "ops bfloat16")))
    for (name, _), row in rows.items():
        assert row["tokens"] == {"1×16": 16, "2×40": 80, names[2]: sum(mixed_lengths(6))}[name]
        assert row["ms"] > 0 and row["rounds"] == 2 and row["peak_bytes"] > 500_000
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["ms"] * 1e3)
        assert row["launches"]["other"] > 0
    assert report["contender"] == "ops float32"
    assert list(report["functions"]) == ["1×16", "2×40"]
    assert report["process_bytes"] > 50e6
    assert report["left_out"] == ["mlx-vlm is not installed"]
    assert [line.split(" ms")[0].rpartition(" ")[0] for line in err.splitlines()] == [": ".join(key) for key in rows]


def test_the_report_begins_with_the_machine_and_ends_with_what_is_missing(run: Run, tiny_text: Path) -> None:
    code, out, _ = run("bench", "--model", tiny_text, "--workloads", "2x9", "--rounds", 1, "--backend", "ops")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith(f"| egemma-mlx | {egemma_mlx.__version__} ")
    for part in ("| float32 products |", "| memory ", "| launch ", "| 2×9 ", "| linear ", "| attention ", "/s | × ops"):
        assert part in out, part
    tables = [block for block in out.split("\n\n") if block.startswith("|")]
    assert len(tables) == 4
    for table in tables:
        assert len({line.replace("\\|", "").count("|") for line in table.splitlines() if line[0] == "|"}) == 1
    assert "\nOne forward of 2×9, ops float32, each kernel function alone:\n" in out
    assert lines[-2].startswith("Peak resident memory of the process: ")
    assert lines[-1] == "Left out: mlx-vlm is not installed."


@pytest.mark.skipif(not on_cpu(), reason="a GPU runs all workloads")
def test_a_cpu_says_which_workloads_it_leaves_out(run: Run, tiny_text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(device._ON_CPU) - {"mixed:40"} < set(STANDARD)
    monkeypatch.setattr(device, "_ON_CPU", ("1x16", "1x128"))
    code, out, _ = run("bench", "--model", tiny_text, "--rounds", 1)
    assert code == 0 and "| 1×128 " in out
    left = "Left out: 32×128, 32×512, 1×8192, mixed, 1,000 texts: too long for a CPU (ask with --workloads)."
    assert out.splitlines()[-1] == left


def test_plain_operations_are_always_beside(run: Run, tiny_text: Path) -> None:
    options = ("--workloads", "1x8", "--rounds", 1, "--compute-precision", "bfloat16", "--json")
    _, out, _ = run("bench", "--model", tiny_text, *options)
    report = json.loads(out)
    assert [row["contender"] for row in report["timings"]][-1] == "ops float32"
    assert len(report["timings"]) == 2


def test_the_order_alternates(plain: Contender) -> None:
    seen: list[str] = []

    def fake(name: str) -> Contender:
        def embed(_: Any) -> Any:
            seen.append(name)

        return Contender(name, plain.model, embed, plain.launches)

    timings, failed = device._timed(workload("1x8"), workload("1x8").texts(300), [fake("a"), fake("b")], 4)
    assert failed == [] and [timing.contender for timing in timings] == ["a", "b"]
    assert "".join(seen) == "aabb" + "ba" + "ab" + "ba" + "ab"


def test_a_contender_that_fails_leaves_the_others_running(plain: Contender) -> None:
    def embed(_: Any) -> Any:
        raise RuntimeError("out of memory")

    broken = Contender("broken", plain.model, embed, plain.launches)
    timings, failed = device._timed(workload("1x8"), workload("1x8").texts(300), [broken, plain], None)
    assert [timing.contender for timing in timings] == ["ops float32"] and 3 <= timings[0].rounds <= 20
    assert failed == ["1×8 by broken (RuntimeError: out of memory)"]


def test_the_largest_and_the_smallest_workload_are_looked_into() -> None:
    def ends(*names: str) -> list[str]:
        return [each.name for each in device._ends([workload(name) for name in names])]

    assert ends("1x128", "1x16", "32x512", "1x8192") == ["1×16", "32×512"]
    assert ends("1x16") == ["1×16"] and ends() == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--workloads", "7"), "expected a workload like"),
        (("--rounds", "0"), "expected a positive integer"),
        (("--backend", "simulator"), "invalid choice: 'simulator'"),
        (("--compute-precision", "float16"), "invalid choice: 'float16'"),
    ],
)
def test_errors_are_one_line(run: Run, tiny_text: Path, options: tuple[str, ...], message: str) -> None:
    code, out, err = run("bench", "--model", tiny_text, *options)
    assert (code, out, err.count("\n")) == (2, "", 1) and message in err


def test_the_module_takes_the_same_arguments(
    tiny_text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    bench.main(["device", "--model", str(tiny_text), "--workloads", "1x8", "--rounds", "1", "--json"])
    assert json.loads(capsys.readouterr().out)["timings"]
