"""Program builders: pure functions from an operation to a program."""
