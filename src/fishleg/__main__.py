"""`fishleg` and `python -m fishleg`: the command line."""

import sys


def main() -> None:
    """Run it, or say what is missing."""
    try:
        from fishleg.cli.commands import main as command
    except ModuleNotFoundError as error:
        if error.name != "click":
            raise
        sys.exit("the command line needs click, rich and safetensors: pip install 'fishleg[cli]'")
    command(prog_name="fishleg")


if __name__ == "__main__":
    main()
