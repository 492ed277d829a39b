"""`python -m penstock.cli`, for where the `penstock` script is not on the path."""

from __future__ import annotations

from penstock.cli.main import main

if __name__ == "__main__":
    main()
