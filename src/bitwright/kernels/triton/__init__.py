"""8-bit codes and their products in Triton, for CUDA devices. Only `launch` can be imported without Triton."""
