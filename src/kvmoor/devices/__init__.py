"""What the engine computes on, seen only through the `Device` protocol."""
