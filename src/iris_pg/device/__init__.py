"""What kernels of users call: loads, stores, atomics and copy-engine transfers to the memory of other ranks."""
