"""What talks to the operating system or a driver."""
