"""Programs as SDMA packets, and what executes them."""
