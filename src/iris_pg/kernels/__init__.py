"""The cu engine: Triton kernels."""
