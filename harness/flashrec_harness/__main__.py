"""``python -m flashrec_harness`` is ``flashrec-harness``."""

from __future__ import annotations

from flashrec_harness.cli import main

if __name__ == "__main__":
    main()
