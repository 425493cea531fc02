"""Parts of a block that the model itself looks at or computes with, although the block runs elsewhere.

Attributes come from the weightless block; the tensors of a part are loaded when it is called for real. Knows nothing
of passes.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class LentParts:
    """The attributes of one block."""

    def __init__(self, block: nn.Module, load: Callable[[], nn.Module]) -> None:
        """Lend from a weightless block; `load` gives it with its weights, and is asked only if a part is called."""
        self._block = block
        self._load = load
        self._lent: dict[str, nn.Module] = {}
        self._lock = threading.RLock()

    def get(self, name: str) -> Any:
        """Return an attribute of the block. Raises AttributeError."""
        value = getattr(self._block, name)
        if isinstance(value, nn.Module):
            return self._lend(name, value)
        if isinstance(value, torch.Tensor) and value.is_meta:
            return getattr(self._load(), name)
        return value

    def _lend(self, name: str, part: nn.Module) -> nn.Module:
        with self._lock:
            if name not in self._lent:
                lent = copy.deepcopy(part)
                for path, module in lent.named_modules(prefix=name):
                    if any(tensor.is_meta for tensor in module.parameters()):
                        module.register_forward_pre_hook(
                            lambda module, _args, path=path: self._fill(path, module)
                        )
                self._lent[name] = lent
            return self._lent[name]

    def _fill(self, path: str, module: nn.Module) -> None:
        with self._lock:
            if any(tensor.is_meta for tensor in module.parameters()):
                module.load_state_dict(self._load().get_submodule(path).state_dict(), assign=True)
