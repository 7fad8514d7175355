"""Code for CPU runs only: patches of Megatron-Core at its import, and layers with compiled kernels."""
