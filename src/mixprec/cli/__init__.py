"""The command line: parse, call a library function, print."""
