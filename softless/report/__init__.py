"""Pages to look at: plain numbers go in, one HTML file comes out, and it fetches nothing."""
