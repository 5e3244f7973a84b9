"""`python -m titanlite`: the `titanlite` command."""

from __future__ import annotations

import sys

from titanlite.cli import main

if __name__ == "__main__":
    sys.exit(main())
