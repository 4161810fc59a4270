"""The operations of a process group, by kind: what each checks, and what it asks of the transport."""
