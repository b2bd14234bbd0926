"""Adapters: the vectors of `Encoder` under the real LangChain, Chroma, LlamaIndex and BERTopic, where installed.

Each is tested by what its library does with it, because that is what breaks: an isinstance, a keyword, a stored config.
"""

from __future__ import annotations

import asyncio
import doctest
import json
import pickle
import re
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import oracle  # noqa: F401  # makes torchvision import beside a CPU torch, which BERTopic asks for
import pytest

from egemma_mlx import Encoder, adapters
from egemma_mlx.adapters import ChromaEmbeddingFunction, LangChainEmbeddings, bertopic_backend, llama_index_embedding
from egemma_mlx.errors import EgemmaError

PAGE = Path(__file__).parents[1] / "docs" / "adapters.md"
QUERY = "my bike keeps skipping"
TEXTS = ["The oven needs ten minutes to heat up.", "A worn chain slips off the bicycle's gears.", "Mars looks red.", ""]
BIKE = TEXTS[1]


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder("mini")


def apart(a: Any, b: Any) -> float:
    assert np.shape(a) == np.shape(b)
    return float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max())


def same(a: Any, b: Any) -> bool:
    return apart(a, b) <= 1e-6


# --- what all share --------------------------------------------------------------------------------------------------


def test_adapters_that_name_one_model_load_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    load = Encoder.__init__

    def counted(self: Encoder, name: str) -> None:
        loaded.append(name)
        load(self, name)

    monkeypatch.setattr(Encoder, "__init__", counted)
    adapters._loaded.cache_clear()
    first, second = LangChainEmbeddings("mini"), ChromaEmbeddingFunction("mini", truncate_dim=64)
    assert loaded == []
    first.embed_query(QUERY)
    second(TEXTS)
    assert loaded == ["mini"]


def test_a_path_is_a_folder_from_anywhere(tiny_text: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tiny_text.parent)
    function = ChromaEmbeddingFunction(Path(tiny_text.name))
    config = function.get_config()
    monkeypatch.chdir(tmp_path)
    assert config["model"] == str(tiny_text)
    with pytest.raises(EgemmaError, match="neither a folder nor a hub id"):
        LangChainEmbeddings(Path("org/name")).embed_query(QUERY)


def test_options_reach_the_encoder(encoder: Encoder) -> None:
    cut = LangChainEmbeddings(encoder, truncate_dim=64, batch_tokens=16)
    assert same(cut.embed_documents(TEXTS), encoder.encode_document(TEXTS, truncate_dim=64))
    symmetric = LangChainEmbeddings(encoder, prompt_name="STS")
    assert same(symmetric.embed_query(QUERY), encoder.encode(QUERY, prompt_name="STS"))
    assert same(symmetric.embed_documents(TEXTS), encoder.encode(TEXTS, prompt_name="STS"))
    with pytest.raises(EgemmaError, match="where 4 are allowed"):
        LangChainEmbeddings(encoder, max_length=4).embed_query(QUERY)
    with pytest.warns(UserWarning, match="cut to 4 tokens"):
        short = LangChainEmbeddings(encoder, max_length=4, truncation=True).embed_query(QUERY)
    assert apart(short, encoder.encode_query(QUERY)) > 0.01
    with pytest.raises(TypeError, match="precision"):
        LangChainEmbeddings(encoder, precision="int8")  # type: ignore[call-arg]


# --- LangChain -------------------------------------------------------------------------------------------------------


def test_langchain_methods_are_the_encoders_vectors_as_lists(encoder: Encoder) -> None:
    embeddings = LangChainEmbeddings(encoder)
    documents, query = embeddings.embed_documents(TEXTS), embeddings.embed_query(QUERY)
    assert type(documents) is list and type(documents[0]) is list and type(documents[0][0]) is float
    assert type(query) is list and type(query[0]) is float
    assert same(documents, encoder.encode_document(TEXTS)) and same(query, encoder.encode_query(QUERY))
    assert apart(query, embeddings.embed_documents([QUERY])[0]) > 0.01  # prompted differently
    assert embeddings.embed_documents([]) == []

    async def both() -> tuple[list[list[float]], list[float]]:
        return await asyncio.gather(embeddings.aembed_documents(TEXTS), embeddings.aembed_query(QUERY))

    later_documents, later_query = asyncio.run(both())
    assert same(later_documents, documents) and same(later_query, query)


@needs("langchain_core")
def test_langchain_takes_it_for_its_own() -> None:
    from langchain_core.embeddings import Embeddings
    from langchain_core.vectorstores import InMemoryVectorStore

    embeddings = LangChainEmbeddings("mini", truncate_dim=128)
    assert isinstance(embeddings, Embeddings)
    assert all(hasattr(embeddings, name) for name in vars(Embeddings) if not name.startswith("_"))
    store = InMemoryVectorStore(embeddings)
    store.add_texts(TEXTS)
    assert store.similarity_search(QUERY, k=1)[0].page_content == BIKE
    (found,) = asyncio.run(store.as_retriever(search_kwargs={"k": 1}).ainvoke(QUERY))
    assert found.page_content == BIKE


# --- Chroma ----------------------------------------------------------------------------------------------------------


def test_chroma_function_is_the_encoder_and_its_config_makes_it_again(encoder: Encoder) -> None:
    function = ChromaEmbeddingFunction("mini", truncate_dim=64)
    again = ChromaEmbeddingFunction.build_from_config(json.loads(json.dumps(function.get_config())))
    assert again == function
    for made in (function, again):
        documents, queries = made(input=TEXTS), made.embed_query(input=[QUERY])
        assert [vector.dtype for vector in documents] == [np.float32] * len(TEXTS)
        assert same(documents, encoder.encode_document(TEXTS, truncate_dim=64))
        assert same(queries, encoder.encode_query([QUERY], truncate_dim=64))


def test_chroma_config_of_an_encoder_is_refused(encoder: Encoder) -> None:
    function = ChromaEmbeddingFunction(encoder)
    assert function.is_legacy() and not ChromaEmbeddingFunction("mini").is_legacy()
    with pytest.raises(EgemmaError, match="expected a model by its name"):
        function.get_config()


@pytest.fixture
def chroma(tmp_path: Path) -> Callable[[], Any]:
    """Clients of one database, each without what the others have in memory."""
    chromadb = pytest.importorskip("chromadb", reason="chromadb is not installed")
    from chromadb.api.shared_system_client import SharedSystemClient
    from chromadb.utils.embedding_functions import known_embedding_functions

    def client() -> Any:
        known_embedding_functions.pop(ChromaEmbeddingFunction.name(), None)
        SharedSystemClient.clear_system_cache()
        return chromadb.PersistentClient(tmp_path, settings=chromadb.Settings(anonymized_telemetry=False))

    return client


def nearest(collection: Any) -> str:
    found = collection.query(query_texts=[QUERY], n_results=1)
    text: str = found["documents"][0][0]
    return text


def test_chroma_stores_the_function_with_the_collection(chroma: Callable[[], Any], encoder: Encoder) -> None:
    from chromadb.api.types import EmbeddingFunction
    from chromadb.utils.embedding_functions import register_embedding_function

    function = ChromaEmbeddingFunction("mini", truncate_dim=64)
    inherited = {name for name in vars(EmbeddingFunction) if not name.startswith("_")} - {"embed_with_retries"}
    assert {name for name in inherited if not hasattr(function, name)} == set()
    collection = chroma().create_collection("notes", embedding_function=function)
    collection.add(ids=list("abcd"), documents=TEXTS)
    assert collection.configuration_json["hnsw"]["space"] == "cosine"
    stored = collection.get(include=["embeddings"])["embeddings"]
    assert same(stored, encoder.encode_document(TEXTS, truncate_dim=64))
    found = collection.query(query_texts=[QUERY], n_results=1)
    cosine = encoder.similarity(
        encoder.encode_query(QUERY, truncate_dim=64), encoder.encode_document(BIKE, truncate_dim=64)
    )
    assert apart(found["distances"], 1 - cosine) < 1e-5

    client = chroma()
    assert nearest(client.get_collection("notes", embedding_function=function)) == BIKE
    client = chroma()
    with pytest.raises(ValueError, match="register_embedding_function"):
        nearest(client.get_collection("notes"))
    register_embedding_function(ChromaEmbeddingFunction)
    assert nearest(client.get_collection("notes")) == BIKE

    changed = ChromaEmbeddingFunction("mini", truncate_dim=64, batch_tokens=128)
    client.get_collection("notes").modify(configuration={"embedding_function": changed})
    assert client.get_collection("notes").configuration_json["embedding_function"]["config"]["batch_tokens"] == 128


def test_chroma_takes_an_encoder_that_it_cannot_store(chroma: Callable[[], Any], encoder: Encoder) -> None:
    function = ChromaEmbeddingFunction(encoder)
    space = {"hnsw": {"space": "cosine"}}
    collection = chroma().create_collection("own", embedding_function=function, configuration=space)
    collection.add(ids=list("abcd"), documents=TEXTS)
    assert nearest(collection) == BIKE
    assert collection.configuration_json["embedding_function"] == {"type": "legacy"}
    assert collection.configuration_json["hnsw"]["space"] == "cosine"
    assert nearest(chroma().get_collection("own", embedding_function=function)) == BIKE


# --- LlamaIndex ------------------------------------------------------------------------------------------------------


def test_llama_index_missing_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_index.core.embeddings", None)
    adapters._llama_index_class.cache_clear()
    with pytest.raises(EgemmaError, match="pip install llama-index-core"):
        llama_index_embedding("mini")


@needs("llama_index")
def test_llama_index_methods_are_the_encoders_vectors(encoder: Encoder) -> None:
    embedding = llama_index_embedding(encoder, truncate_dim=128)
    documents = encoder.encode_document(TEXTS, truncate_dim=128)
    query = encoder.encode_query(QUERY, truncate_dim=128)
    assert same(embedding.get_text_embedding_batch(TEXTS), documents)
    assert same(embedding.get_text_embedding(BIKE), documents[1])
    assert same(embedding.get_query_embedding(QUERY), query)
    assert same(embedding.get_agg_embedding_from_queries([QUERY, QUERY]), query)
    assert abs(embedding.similarity(query.tolist(), documents[1].tolist()) - query @ documents[1]) < 1e-5
    embedding.embed_batch_size = 2
    assert same(embedding.get_text_embedding_batch(TEXTS), documents)

    async def later() -> list[Any]:
        return await asyncio.gather(
            embedding.aget_text_embedding_batch(TEXTS),
            embedding.aget_text_embedding(BIKE),
            embedding.aget_query_embedding(QUERY),
        )

    batch, text, asked = asyncio.run(later())
    assert same(batch, documents) and same(text, documents[1]) and same(asked, query)


@needs("llama_index")
def test_llama_index_takes_it_as_settings_and_as_argument() -> None:
    from llama_index.core import Settings, VectorStoreIndex
    from llama_index.core.schema import TextNode

    embedding = llama_index_embedding("mini")
    before = Settings._embed_model
    try:
        Settings.embed_model = embedding
        assert Settings.embed_model is embedding
        indices = [VectorStoreIndex([TextNode(text=text) for text in TEXTS])]
    finally:
        Settings._embed_model = before
    indices.append(VectorStoreIndex([TextNode(text=text) for text in TEXTS], embed_model=embedding))
    for index in indices:
        (found,) = index.as_retriever(similarity_top_k=1, embed_model=embedding).retrieve(QUERY)
        assert found.node.get_content() == BIKE


@needs("llama_index")
def test_llama_index_caches_tell_models_and_options_apart() -> None:
    made = [llama_index_embedding("mini"), llama_index_embedding("mini", truncate_dim=64), llama_index_embedding("x/y")]
    assert len({json.dumps(embedding.to_dict()) for embedding in made}) == 3


# --- BERTopic --------------------------------------------------------------------------------------------------------


def test_bertopic_missing_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bertopic.backend", None)
    adapters._bertopic_class.cache_clear()
    with pytest.raises(EgemmaError, match="pip install bertopic"):
        bertopic_backend("mini")


@needs("bertopic")
def test_bertopic_selects_the_backend_and_finds_the_topics(encoder: Encoder, tmp_path: Path) -> None:
    from bertopic import BERTopic
    from bertopic.backend._utils import select_backend
    from bertopic.dimensionality import BaseDimensionalityReduction
    from sklearn.cluster import KMeans

    backend = bertopic_backend("mini", truncate_dim=128)
    assert select_backend(backend) is backend
    clustered = encoder.encode(TEXTS, prompt_name="Clustering", truncate_dim=128)
    again = pickle.loads(pickle.dumps(backend))
    for embed in (backend.embed, backend.embed_documents, backend.embed_words, again.embed):
        assert same(embed(TEXTS), clustered)
    assert apart(backend.embed(TEXTS), encoder.encode_document(TEXTS, truncate_dim=128)) > 0.01
    assert same(bertopic_backend(encoder, prompt_name="STS").embed(TEXTS), encoder.encode(TEXTS, prompt_name="STS"))

    kitchen = [f"{a} {b}" for a in ("bread", "the soup", "an oven") for b in ("for dinner", "is hot", "in the pot")]
    bicycles = [f"{a} {b}" for a in ("the chain", "a tyre", "the saddle") for b in ("of my bike", "squeaks", "broke")]
    # Neither UMAP nor HDBSCAN: the topics are what the vectors say.
    topics = BERTopic(
        embedding_model=backend,
        umap_model=BaseDimensionalityReduction(),
        hdbscan_model=KMeans(2, n_init=4, random_state=0),
    )
    found, _ = topics.fit_transform(kitchen + bicycles)
    assert len(set(found[:9])) == len(set(found[9:])) == 1 and found[0] != found[9]
    topics.save(tmp_path / "topics", serialization="pickle")
    (nearest_topic, *_), _ = BERTopic.load(str(tmp_path / "topics")).find_topics("a bicycle to repair")
    assert nearest_topic == found[9]


# --- docs/adapters.md ------------------------------------------------------------------------------------------------


SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize(
    "section",
    [
        pytest.param(name, marks=needs(package))
        for name, package in (
            ("LangChain", "langchain_core"),
            ("Chroma", "chromadb"),
            ("LlamaIndex", "llama_index"),
            ("BERTopic", "bertopic"),
        )
    ],
)
def test_snippets_run(section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = "".join(re.findall(r"^```pycon\n(.*?)^```$", SECTIONS[section], re.MULTILINE | re.DOTALL))
    examples = doctest.DocTestParser().get_doctest(source, {}, section, str(PAGE), 0)
    assert len(examples.examples) >= 4
    report: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(examples, out=report.append)
    assert result.failed == 0, "".join(report)
