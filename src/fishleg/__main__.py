"""`fishleg` and `python -m fishleg`: the command line."""

import sys


def main() -> None:
    """Run the command line, or print how to install what it needs.

    Raises:
        ModuleNotFoundError: A module other than click is missing.
    """
    try:
        from fishleg.cli.commands import main as command
        from fishleg.cli.output import end_with_command
    except ModuleNotFoundError as error:
        if error.name != "click":
            raise
        sys.exit("the command line needs click, rich and safetensors: pip install 'fishleg[cli]'")
    end_with_command()
    command(prog_name="fishleg")


if __name__ == "__main__":
    main()
