"""Which blocks give way when room is needed."""
