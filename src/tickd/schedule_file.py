"""The schedule on disk: a path becomes a schedule, or a plain sentence about why not."""

from collections.abc import Mapping
from pathlib import Path

from tickd.errors import Unusable
from tickd.schedule import Fault, Schedule, ScheduleError, parse


def read(path: str | Path, environment: Mapping[str, str]) -> Schedule:
    """Return the schedule of a file; Unusable when it cannot be read, ScheduleError with every fault when it is wrong."""
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        raise Unusable(
            f"{path}: there is no such file; `tickd init` writes a schedule to start from"
        ) from None
    except IsADirectoryError:
        raise Unusable(f"{path}: this is a directory; name the schedule file itself") from None
    except OSError as error:
        raise Unusable(f"{path}: cannot be read: {error.strerror}") from None
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line, column = data.count(b"\n", 0, error.start) + 1, error.start - data.rfind(b"\n", 0, error.start)
        fault = Fault(str(path), line, column, "this is not UTF-8: save the file as UTF-8")
        raise ScheduleError((fault,), Schedule(str(path), {})) from None
    return parse(text, path=str(path), environment=environment)
