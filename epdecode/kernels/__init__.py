"""Kernels: one op a file, each with its checks and launch, its Triton body and its plain twin."""
