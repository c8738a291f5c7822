"""Code that every kernel family uses."""
