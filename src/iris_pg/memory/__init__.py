"""The symmetric heap: links between ranks, allocation, and the control page."""
