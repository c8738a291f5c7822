"""What every kernel family uses."""
