"""tickd: one tick of one graph has one writer, on however many replicas.

`from tickd import sole_writer` is the way in for code that is not a scheduled graph; without an event loop,
`from tickd.sync import sole_writer`.
"""

from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from tickd.writer import LockLost, WriterHold, sole_writer

__all__ = ["LockLost", "WriterHold", "sole_writer"]


def __getattr__(name: str) -> Any:
    # LangGraph takes a second to import, which `tickd --help` and the pure core do without.
    if name in __all__:
        from tickd import writer  # noqa: PLC0415  # see above

        return getattr(writer, name)
    raise AttributeError(f"module 'tickd' has no attribute {name!r}")
