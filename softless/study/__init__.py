"""What lies between `softless study` and its page: twins, their grid, the examination, the verdict, the page."""
