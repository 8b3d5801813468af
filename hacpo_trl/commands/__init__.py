"""What the command line does, a command a file. May use every other room; none uses it."""
