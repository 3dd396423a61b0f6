"""Times of the Triton kernels beside an empty kernel, a copy, PyTorch eager and torch.compile."""
