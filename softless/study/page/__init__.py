"""The page of a study: its figures, its words, its template."""
