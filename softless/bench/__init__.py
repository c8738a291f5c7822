"""Time and memory: stopwatch, rivals, contests, their page."""
