"""Training that survives: recipes, a loop that resumes exactly, evaluation, one device or many."""
