"""`python -m cpmoe COMMAND`: everything that needs no engine."""

from cpmoe.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
