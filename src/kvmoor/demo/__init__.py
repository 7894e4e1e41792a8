"""A small language model that answers questions about three documents twice: computed first, then from host memory."""
