"""`python -m tickd` is the command line."""

from tickd.cli import main


if __name__ == "__main__":
    main()
