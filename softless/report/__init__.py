"""Parts of the HTML pages, and numbers in the units that people read."""
