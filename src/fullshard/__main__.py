"""`python -m fullshard` is the command `fullshard`."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
