"""`serve-model`, also as `python -m serving`."""

from exporter.terminal import interrupt_at_once


def main() -> None:
    """Run the command `serve-model`, and end the process with its exit code.

    Its modules are imported after Ctrl-C is set to end the process at once.
    """
    interrupt_at_once()
    from serving import cli

    cli.main()


if __name__ == "__main__":
    main()
