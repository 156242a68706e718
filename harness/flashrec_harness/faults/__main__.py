"""``python -m flashrec_harness.faults flashrec serve ...``: the engine's command line with the faults planted."""

from __future__ import annotations

import sys

from flashrec.cli import main
from flashrec_harness.planting import planted

if __name__ == "__main__":
    program, *arguments = sys.argv[1:]
    if program != "flashrec":
        raise SystemExit(f"only flashrec can be started here, not {program!r}")
    sys.argv = [program, *arguments]
    with planted():
        main()
