"""Reads the bytes of tensors into memory that the caller made, chunk by chunk, hashing on the side.

Positioned reads, no memory map: mapped pages count as the process's own. Does not know names or models.
"""

from __future__ import annotations

import math
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch

from slicing.errors import ModelError
from slicing.tensor_file import TensorRange

CHUNK_BYTES = 1 << 20  # small enough that a chunk is still in the cache when it is hashed and converted


class Hasher(Protocol):
    """What `hashlib` makes."""

    def update(self, data: memoryview, /) -> None:
        """Take in more bytes."""


class TensorReader:
    """Reads tensors from files that it keeps open until `close`. Used from one thread at a time.

    Hashing runs in a second thread, one chunk behind the reading: SHA-256 takes 0.6 ms per MiB with the
    CPU's own instructions, more than reading from the page cache does.
    """

    def __init__(self) -> None:
        self.bytes_requested = 0
        self._files: dict[Path, int] = {}
        self._buffers: list[torch.Tensor] = []  # two: one is converted while the other is read or hashed
        self._hashing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hash")

    def read_into(self, tensor: TensorRange, out: torch.Tensor, hasher: Hasher | None = None) -> None:
        """Read one tensor into `out` (contiguous, on the CPU, as many elements, of any dtype).

        When the dtypes agree the bytes go straight into `out`; otherwise they are converted chunk by chunk,
        so that no second copy of the tensor ever exists. Raises `ModelError` when the file ends early.
        """
        if not out.is_contiguous() or out.numel() != math.prod(tensor.shape):
            raise ValueError(f"a tensor of shape {tensor.shape} needs a contiguous destination of that size")
        self.bytes_requested += tensor.size_bytes
        target = out.detach().reshape(-1)
        step = CHUNK_BYTES // tensor.dtype.itemsize
        is_direct = target.dtype == tensor.dtype
        if not is_direct and not self._buffers:
            self._buffers = [torch.empty(CHUNK_BYTES, dtype=torch.uint8) for _ in range(2)]
        hashed: Future[None] | None = None
        for first in range(0, target.numel(), step):
            part = target[first : first + step]
            chunk = part if is_direct else self._buffers[first // step % 2].view(tensor.dtype)[: part.numel()]
            payload = memoryview(chunk.view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy's own stub gap
            self._read_exactly(tensor, tensor.begin + first * tensor.dtype.itemsize, payload)
            if hashed is not None:
                hashed.result()  # the other buffer is free again
            hashed = self._hashing.submit(hasher.update, payload) if hasher is not None else None
            if not is_direct:
                part.copy_(chunk)
        if hashed is not None:
            hashed.result()

    def close(self) -> None:
        """Close the files, drop the buffers and end the thread; the next read makes them again."""
        self._buffers = []
        self._hashing.shutdown()
        self._hashing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hash")
        while self._files:
            os.close(self._files.popitem()[1])

    def _read_exactly(self, tensor: TensorRange, offset: int, payload: memoryview) -> None:
        try:
            if tensor.file not in self._files:
                self._files[tensor.file] = os.open(tensor.file, os.O_RDONLY)
            while len(payload):
                count = os.preadv(self._files[tensor.file], [payload], offset)
                if count == 0:
                    raise ModelError(f"{tensor.file} is damaged: it ends at byte {offset}; fetch it again")
                payload, offset = payload[count:], offset + count
        except OSError as error:
            raise ModelError(f"cannot read {tensor.file}: {error.strerror}") from error
