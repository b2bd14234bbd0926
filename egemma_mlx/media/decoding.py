"""The images of one call of `Encoder.encode`: their sizes at once, their patches when the model comes to them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import TypeVar

import numpy as np

from egemma_mlx.errors import EgemmaError
from egemma_mlx.media.image import ImageProcessor, ImageSource, Patches

_T = TypeVar("_T")

# A PIL image may not have read its file yet, and two threads that hold it must not do so at once.
_pil_lock = threading.Lock()


class Decoder:
    """Decodes on threads (Pillow lets go of the GIL), one batch ahead of the model, and keeps nothing of a batch that
    was taken.

    Args:
        processor: None where no input has an image.
        sources: the images of each input.
        skip: note the inputs whose images cannot be read, instead of raising the first one's error.

    Attributes:
        soft_tokens: of each image of each input, from the headers of the files.
        errors: of the inputs that cannot be read, by index.
    """

    def __init__(
        self, processor: ImageProcessor | None, sources: Sequence[Sequence[ImageSource]], *, skip: bool
    ) -> None:
        self.errors: dict[int, EgemmaError] = {}
        self.soft_tokens: list[list[int]] = [[] for _ in sources]
        self._processor, self._sources, self._skip = processor, sources, skip
        self._pool = ThreadPoolExecutor(os.cpu_count(), "egemma_mlx image")
        self._lock = threading.Lock()
        self._batches: Sequence[Sequence[int]] = ()
        self._started = 0
        self._jobs: dict[int, dict[int, Future[list[Patches] | None]]] = {}
        try:
            if processor is not None:
                jobs = {i: self._submit(processor.soft_tokens, i) for i, images in enumerate(sources) if images}
                for index, job in jobs.items():
                    self.soft_tokens[index] = job.result() or []
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Decoder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def schedule(self, batches: Sequence[Sequence[int]]) -> None:
        """The batches of inputs, in the order in which `take` will ask for them."""
        self._batches = batches

    def take(self, number: int) -> tuple[list[int], list[Patches]]:
        """The inputs of a batch that can be read, and the patches of their images in order. Starts on the next batch's.

        Raises:
            EgemmaError: an image cannot be read, without `skip`.
        """
        with self._lock:
            while self._processor and self._started < min(number + 2, len(self._batches)):
                batch = self._batches[self._started]
                self._jobs[self._started] = {i: self._submit(self._processor, i) for i in batch if self._sources[i]}
                self._started += 1
            jobs = self._jobs.pop(number, {})
        images = {index: job.result() for index, job in jobs.items()}
        readable = [index for index in self._batches[number] if index not in self.errors]
        return readable, [patches for index in readable for patches in images.get(index) or ()]

    def _submit(self, function: Callable[[ImageSource], _T], index: int) -> Future[list[_T] | None]:
        """`function` of each image of an input; None where one cannot be read."""
        return self._pool.submit(self._each, function, index)

    def _each(self, function: Callable[[ImageSource], _T], index: int) -> list[_T] | None:
        try:
            return [_apart(function, source) for source in self._sources[index]]
        except EgemmaError as error:
            named = EgemmaError(f"input {index}: {error}")
            if not self._skip:
                raise named from error
            self.errors[index] = named
            return None


def _apart(function: Callable[[ImageSource], _T], source: ImageSource) -> _T:
    alone = nullcontext() if isinstance(source, (str, Path, bytes, np.ndarray)) else _pil_lock
    with alone:
        return function(source)
