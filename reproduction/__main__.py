"""`python -m reproduction`."""

from reproduction.command_line import main

if __name__ == "__main__":
    main()
