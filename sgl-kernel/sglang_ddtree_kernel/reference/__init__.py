"""Plain PyTorch specifications of the operators: what a CPU runs and what the kernels are tested against."""
