"""What a cache of some size would have saved on a recorded trace: the real index and policies, no device, no bytes."""
