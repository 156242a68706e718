"""``python -m flashrec_harness.faults.child flashrec serve ...``: the engine's command line with the faults planted.

A server's front processes are started with *spawn*, which runs this module in them once more, as ``__mp_main__``: they
carry the faults as well. (It would not for a package's ``__main__``.)
"""

from __future__ import annotations

import sys

from flashrec.cli import main
from flashrec_harness.planting import planted

_faults = planted()

if __name__ == "__mp_main__":
    _faults.__enter__()  # for the life of the process; the name keeps them planted
elif __name__ == "__main__":
    program, *arguments = sys.argv[1:]
    if program != "flashrec":
        raise SystemExit(f"only flashrec can be started here, not {program!r}")
    sys.argv = [program, *arguments]
    with _faults:
        main()
