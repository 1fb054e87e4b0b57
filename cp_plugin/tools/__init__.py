"""The command line: a module per command, and modules that print their results."""
