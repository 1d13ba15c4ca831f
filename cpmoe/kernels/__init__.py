"""What Triton kernels of any package share: architectures, calls, products, and compiling ahead."""
