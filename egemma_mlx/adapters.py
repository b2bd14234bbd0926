"""The embedding interfaces of LangChain, Chroma, LlamaIndex and BERTopic over `Encoder`.

    store = InMemoryVectorStore(LangChainEmbeddings("google/embeddinggemma-2"))
    notes = client.create_collection("notes", embedding_function=ChromaEmbeddingFunction("mini"))
    Settings.embed_model = llama_index_embedding("mini", truncate_dim=128)
    topics = BERTopic(embedding_model=bertopic_backend("mini"))

Vectors are those of `Encoder`. LangChain and Chroma are content with an object that has their methods; LlamaIndex and
BERTopic want a subclass of theirs, so those two are functions, which import the library when they are called.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from egemma_mlx.errors import EgemmaError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from egemma_mlx.encoder import Encoder

# Texts that LlamaIndex hands over at a time. Its own default, 10, leaves most of a GPU without work.
_LLAMA_INDEX_BATCH = 256


@dataclass(frozen=True)
class Adapter:
    """A model, and how it is to encode.

    Args:
        model: an `Encoder`; or a folder, a hub id or "mini", which is loaded when the first text comes, once for all
            adapters that name it.
        prompt_name: one of the checkpoint's prompts for every text. Default: "query" for queries, "document" for
            documents.
        truncate_dim, max_length, truncation, batch_tokens: as `Encoder.encode` has them. Without `truncation` a text
            beyond the model's limit is an error.
    """

    model: Encoder | str | Path
    _: KW_ONLY
    prompt_name: str | None = None
    truncate_dim: int | None = None
    max_length: int | None = None
    truncation: bool = False
    batch_tokens: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """All but the model."""
        return {name: value for name, value in vars(self).items() if name != "model"}

    def queries(self, texts: Sequence[str], show_progress_bar: bool | None = None) -> NDArray[np.float32]:
        """Unit vectors [N, D]."""
        return self._encoder.encode_query(texts, show_progress_bar=show_progress_bar, **self.options)

    def documents(self, texts: Sequence[str], show_progress_bar: bool | None = None) -> NDArray[np.float32]:
        """Unit vectors [N, D]."""
        return self._encoder.encode_document(texts, show_progress_bar=show_progress_bar, **self.options)

    @property
    def _encoder(self) -> Encoder:
        return _loaded(_name(self.model)) if isinstance(self.model, (str, Path)) else self.model


@dataclass(frozen=True)
class LangChainEmbeddings(Adapter):
    """LangChain's `Embeddings`; takes what `Adapter` takes."""

    def __post_init__(self) -> None:
        # Some stores (FAISS) ask isinstance, and would call what is no `Embeddings` as a function.
        if find_spec("langchain_core"):
            from langchain_core.embeddings import Embeddings

            Embeddings.register(type(self))

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return self.documents(texts).tolist()

    def embed_query(self, text: str) -> list[float]:
        (vector,) = self.queries([text]).tolist()
        return vector

    async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
        return await asyncio.to_thread(self.embed_documents, texts)

    async def aembed_query(self, text: str) -> list[float]:
        return await asyncio.to_thread(self.embed_query, text)


class ChromaEmbeddingFunction(Adapter):
    """Chroma's `EmbeddingFunction`; takes what `Adapter` takes.

    A collection stores the model's name and the options, and Chroma makes the function from them once its
    `register_embedding_function` has had this class, or a collection an object of it, in the same process. An `Encoder`
    cannot be stored: `get_collection` needs an object again.
    """

    def __call__(self, input: list[str]) -> list[NDArray[np.float32]]:  # Chroma checks this name
        return list(self.documents(input))

    def embed_query(self, input: list[str]) -> list[NDArray[np.float32]]:
        return list(self.queries(input))

    @staticmethod
    def name() -> str:
        return "egemma_mlx"

    def get_config(self) -> dict[str, Any]:
        if not isinstance(self.model, (str, Path)):
            raise EgemmaError("expected a model by its name, which Chroma can store, but got an Encoder")
        return {"model": _name(self.model), **self.options}

    @staticmethod
    def build_from_config(config: dict[str, Any]) -> ChromaEmbeddingFunction:
        return ChromaEmbeddingFunction(**config)

    def is_legacy(self) -> bool:
        """Chroma's word for a function that it cannot build again."""
        return not isinstance(self.model, (str, Path))

    def default_space(self) -> str:
        return "cosine"

    def supported_spaces(self) -> list[str]:
        return ["cosine", "l2", "ip"]

    @staticmethod
    def validate_config(config: dict[str, Any]) -> None:
        ChromaEmbeddingFunction.build_from_config(config)

    def validate_config_update(self, old_config: dict[str, Any], new_config: dict[str, Any]) -> None:
        """A model's files may move. Vectors of another width Chroma refuses by itself."""


def llama_index_embedding(model: Encoder | str | Path, **options: Any) -> Any:
    """LlamaIndex's `BaseEmbedding`; takes what `Adapter` takes.

    Raises:
        EgemmaError: llama-index-core is not installed.
    """
    adapter = Adapter(model, **options)
    name = _name(model) if isinstance(model, (str, Path)) else "egemma_mlx"
    embedding = _llama_index_class()(model_name=name, options=adapter.options, embed_batch_size=_LLAMA_INDEX_BATCH)
    embedding._adapter = adapter
    return embedding


def bertopic_backend(model: Encoder | str | Path, *, prompt_name: str = "Clustering", **options: Any) -> Any:
    """BERTopic's `BaseEmbedder`; takes what `Adapter` takes, and its prompt is that for clustering.

    Raises:
        EgemmaError: BERTopic is not installed.
    """
    return _bertopic_class()(Adapter(model, prompt_name=prompt_name, **options))


def _name(model: str | Path) -> str:
    """A path is a folder, and no hub id, wherever its name is read again."""
    return str(model.absolute()) if isinstance(model, Path) else model


@functools.cache
def _loaded(name: str) -> Encoder:
    from egemma_mlx.encoder import Encoder

    return Encoder(name)


@functools.cache
def _llama_index_class() -> Any:
    try:
        from llama_index.core.embeddings import BaseEmbedding
    except ModuleNotFoundError:
        raise EgemmaError("this needs LlamaIndex: pip install llama-index-core") from None

    class EgemmaEmbedding(BaseEmbedding):
        options: dict[str, Any]  # public, because LlamaIndex's caches know an embedding by its fields
        _adapter: Adapter

        @classmethod
        def class_name(cls) -> str:
            return "EgemmaEmbedding"

        def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
            return self._adapter.documents(texts, show_progress_bar=False).tolist()  # LlamaIndex has a bar of its own

        def _get_text_embedding(self, text: str) -> list[float]:
            return self._get_text_embeddings([text])[0]

        def _get_query_embedding(self, query: str) -> list[float]:
            (vector,) = self._adapter.queries([query]).tolist()
            return vector

        async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
            return await asyncio.to_thread(self._get_text_embeddings, texts)

        async def _aget_text_embedding(self, text: str) -> list[float]:
            return await asyncio.to_thread(self._get_text_embedding, text)

        async def _aget_query_embedding(self, query: str) -> list[float]:
            return await asyncio.to_thread(self._get_query_embedding, query)

    return EgemmaEmbedding


@functools.cache
def _bertopic_class() -> Any:
    try:
        from bertopic.backend import BaseEmbedder
    except ModuleNotFoundError:
        raise EgemmaError("this needs BERTopic: pip install bertopic") from None

    class EgemmaBackend(BaseEmbedder):
        def embed(self, documents: Sequence[str], verbose: bool = False) -> NDArray[np.float32]:
            return self.embedding_model.documents(documents, show_progress_bar=verbose)

        def __reduce__(self) -> Any:  # BERTopic saves topics as pickles, which know no class of a function
            return functools.partial(bertopic_backend, **vars(self.embedding_model)), ()

    return EgemmaBackend
