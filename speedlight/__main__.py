"""`python -m speedlight`: the `speedlight` command."""

from .tools.cli import main

if __name__ == "__main__":
    main()
