"""The way into the command line: `python -m tickd`, and the script `tickd`."""

import signal
import sys


def main() -> None:
    """Listen to SIGTERM, then load the commands and run one.

    As process 1, Python ignores a SIGTERM that nobody handles, and loading takes a moment in which a container would not
    hear that it is to stop. What runs until it is stopped has done what it was to do; any other command has not.
    """
    code = 0 if sys.argv[1:2] in (["run"], ["dev"]) else 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(code))
    from tickd import cli  # noqa: PLC0415  # see above

    cli.main()


if __name__ == "__main__":
    main()
