"""The command line: thin commands over the library. Heavy modules are imported only by the commands that need them."""

from harp.cli import signals

__all__ = ["app", "main"]


def main() -> None:
    """The `harp` command."""
    signals.install()  # before anything else is imported, which takes a while: Ctrl-C may come at once
    try:
        from harp.cli import commands

        commands.main()
    except KeyboardInterrupt:
        signals.end_quietly()
    finally:
        signals.work_is_over()


def __getattr__(name: str) -> object:
    if name == "app":
        from harp.cli.commands import app

        return app
    raise AttributeError(f"module 'harp.cli' has no attribute {name!r}")
