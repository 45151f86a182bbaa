"""The tool around the library: recipes, runs that can be resumed, reports, and the command line."""
