"""For every test: kernels are compiled once for all of them, however many caches of their own they have."""

from __future__ import annotations

import os

from slicing.cache import cache_root

os.environ.setdefault("DIFFUSE_KERNEL_CACHE", str(cache_root() / "kernels"))
