"""`python -m cli`: the same as the `diffuse` console script."""

from __future__ import annotations

from cli.main import main

if __name__ == "__main__":
    main()
