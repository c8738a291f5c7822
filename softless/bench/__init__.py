"""Count and measure the time and memory of attention calls and models."""
