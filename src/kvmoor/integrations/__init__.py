"""kvmoor inside other people's engines. Each package here imports the engine it is named after; no other code does."""
