"""NVIDIA GPUs as devices: one copy kernel and the copy engine, through the CUDA driver; no framework is imported."""
