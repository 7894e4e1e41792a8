"""Plans of copies, and the lanes they run on."""
