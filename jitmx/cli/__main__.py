"""`python -m jitmx.cli`, where the `jitmx` command is not on the path."""

from jitmx.cli import main

if __name__ == "__main__":
    main()
