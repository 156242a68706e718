"""``python -m flashrec``."""

from flashrec.cli import main

if __name__ == "__main__":
    main()
