"""Device kernels. Each file holds one operation: its plain PyTorch reference and its Triton kernel."""
