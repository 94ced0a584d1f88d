"""Exit codes of every subcommand."""

EXIT_OK = 0
EXIT_PROBLEMS = 1
"""Something that was asked about is not sound."""
EXIT_USAGE = 2
"""Wrong arguments, or nothing there to look at."""
EXIT_INTERRUPTED = 128 + 2
EXIT_BROKEN_PIPE = 128 + 13
